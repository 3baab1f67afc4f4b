"""`order: megatron` reads what Megatron Core's own datasets return."""

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nvfp4_train.data.fingerprint import pairs_fingerprint
from nvfp4_train.data.megatron_order import blend_index
from nvfp4_train.data.megatron_samples import MegatronRequest, MegatronSamples
from nvfp4_train.data.rows import read_rows
from nvfp4_train.data.source import SourceTokens
from tests.support.token_files import write_pair

pytestmark = pytest.mark.peer
gpt_dataset = pytest.importorskip(
    "megatron.core.datasets.gpt_dataset", reason="pip install --no-deps megatron-core==0.16.1"
)
SEED = 77


class Tokenizer:
    """What Megatron asks of one."""

    eod, pad, vocab_size = 0, 999, 2000

    def __init__(self):
        self.unique_identifiers = OrderedDict(name="test")


def theirs(prefix, *, length, num_samples, extra_token, cache):
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    config = gpt_dataset.GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=length,
        blend=([str(prefix)], None),
        split="100,0,0",
        path_to_cache=str(cache),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        tokenizer=Tokenizer(),
        add_extra_token_to_sequence=extra_token,
    )
    pair = IndexedDataset(str(prefix))
    indices = np.arange(len(pair), dtype=np.int32)
    return gpt_dataset.GPTDataset(pair, str(prefix), indices, num_samples, Split.train, config)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30).filter(lambda some: sum(some) > 40),
    length=st.integers(2, 16),
    epochs=st.floats(0.1, 4.0),
    extra_token=st.booleans(),
)
def test_rows_and_order_are_megatrons(tmp_path_factory, lengths, length, epochs, extra_token):
    folder = tmp_path_factory.mktemp("order")
    tokens = iter(range(1, 2000))
    pair = write_pair(folder / "pair", [[next(tokens) for _ in range(size)] for size in lengths])
    num_samples = max(1, int(epochs * sum(lengths) / length))
    expected = theirs(
        folder / "pair", length=length, num_samples=num_samples, extra_token=extra_token, cache=folder / "theirs"
    )
    request = MegatronRequest(
        fingerprint=pairs_fingerprint([pair]),
        split=(100.0, 0.0, 0.0),
        part=0,
        num_samples=num_samples,
        sequence_length=length,
        seed=SEED,
        extra_token=extra_token,
    )
    ours = MegatronSamples(
        SourceTokens([pair]),
        [pair],
        request=request,
        vocab_size=2000,
        count_document_ends=True,
        cache_dir=folder / "ours",
    )
    assert ours.num_samples == len(expected)
    rows = read_rows(ours, ours.order(np.arange(len(expected))))
    counted = length if extra_token else length - 1  # without the extra token Megatron pads the last label
    for index in range(len(expected)):
        item = expected[index]
        assert rows.tokens[index].tolist() == item["tokens"].tolist()
        assert rows.labels[index, :counted].tolist() == item["labels"][:counted].tolist()


@settings(max_examples=30, deadline=None)
@given(weights=st.lists(st.floats(0.01, 10), min_size=1, max_size=6), size=st.integers(1, 400))
def test_a_blend_is_megatrons(weights, size):
    helpers = pytest.importorskip("megatron.core.datasets.helpers_cpp")
    sources, indices = np.zeros(size, dtype=np.int16), np.zeros(size, dtype=np.int64)
    total = sum(weights)
    shares = np.asarray([weight / total for weight in weights])
    helpers.build_blending_indices(sources, indices, shares, len(weights), size, False)
    ours = blend_index(weights, size)
    assert ours[0].tolist() == sources.tolist()
    assert ours[1].tolist() == indices.tolist()
