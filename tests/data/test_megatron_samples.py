import numpy as np
import pytest

from nvfp4_train.data import megatron_samples
from nvfp4_train.data.batch import IGNORE_INDEX
from nvfp4_train.data.error import DataError
from nvfp4_train.data.fingerprint import pairs_fingerprint
from nvfp4_train.data.indexed import IndexedTokens
from nvfp4_train.data.megatron_samples import MegatronRequest, MegatronSamples, cached_blend
from nvfp4_train.data.rows import read_rows
from nvfp4_train.data.source import SourceTokens
from tests.support.token_files import GOLDEN_PAIRS, write_pair


def open_samples(cache, *pairs, count_document_ends=True, **changes):
    fields = {
        "fingerprint": pairs_fingerprint(pairs),
        "split": (100.0, 0.0, 0.0),
        "part": 0,
        "num_samples": None,
        "sequence_length": 64,
        "seed": 1234,
        "extra_token": True,
    }
    return MegatronSamples(
        SourceTokens(pairs),
        list(pairs),
        request=MegatronRequest(**(fields | changes)),
        vocab_size=131072,
        count_document_ends=count_document_ends,
        cache_dir=cache,
    )


@pytest.mark.parametrize(
    ("name", "pair", "options"),
    [
        ("A_one_epoch_seq64", "docsA_uint16", {}),
        ("A_two_epochs_part_seq64", "docsA_uint16", {"num_samples": 448}),
        ("A_no_extra_token_seq64", "docsA_uint16", {"num_samples": 598, "extra_token": False}),
        ("A_split_90_8_2_valid", "docsA_uint16", {"num_samples": 40, "split": (90.0, 8.0, 2.0), "part": 1}),
        ("B_one_epoch_seq32_seed7", "docsB_int32", {"sequence_length": 32, "seed": 7}),
    ],
)
def test_rows_are_those_that_megatron_returns(tmp_path, name, pair, options):
    golden = np.load(GOLDEN_PAIRS / f"{name}.npz")
    samples = open_samples(tmp_path, IndexedTokens(GOLDEN_PAIRS / pair), **options)
    items = [int(key.split(".")[0].removeprefix("sample")) for key in golden.files if key.endswith(".tokens")]
    assert len(items) >= 4
    rows = read_rows(samples, samples.order(np.asarray(items)))
    for row, item in enumerate(items):
        assert rows.tokens[row].tolist() == golden[f"sample{item}.tokens"].tolist()
        labels = golden[f"sample{item}.labels"].tolist() if f"sample{item}.labels" in golden.files else None
        if labels is not None and options.get("extra_token", True):
            assert rows.labels[row].tolist() == labels


def test_without_the_extra_token_the_last_label_is_unknown(tmp_path):
    samples = open_samples(tmp_path, IndexedTokens(GOLDEN_PAIRS / "docsA_uint16"), num_samples=598, extra_token=False)
    rows = read_rows(samples, samples.order(np.arange(20)))
    assert np.all(rows.labels[:, -1] == IGNORE_INDEX)
    assert np.array_equal(rows.labels[:, :-1], rows.tokens[:, 1:])


def test_documents_are_told_apart_and_their_ends_do_not_count(tmp_path):
    pair = IndexedTokens(GOLDEN_PAIRS / "docsA_uint16")
    samples = open_samples(tmp_path, pair, count_document_ends=False)
    rows = read_rows(samples, samples.order(np.arange(40)))
    # Each document of this file ends with its only token 2.
    starts = np.zeros(rows.tokens.shape, dtype=bool)
    starts[:, 1:] = rows.tokens[:, :-1] == 2
    assert np.array_equal(rows.document_ids, np.cumsum(starts, axis=1))
    assert np.array_equal(rows.labels == IGNORE_INDEX, rows.tokens == 2)


def test_several_files_are_those_that_a_merge_would_give(tmp_path):
    parts = [IndexedTokens(GOLDEN_PAIRS / name) for name in ("docsA_uint16", "docsA2_uint16")]
    merged = open_samples(tmp_path, IndexedTokens(GOLDEN_PAIRS / "merged_A_A2_uint16"))
    apart = open_samples(tmp_path, *parts)
    order = merged.order(np.arange(merged.num_samples))
    assert np.array_equal(read_rows(merged, order).tokens, read_rows(apart, order).tokens)


def test_every_option_has_indices_of_its_own(tmp_path):
    pair = IndexedTokens(GOLDEN_PAIRS / "docsA_uint16")
    changes = [
        {},
        {"extra_token": False},
        {"seed": 1},
        {"num_samples": 400},
        {"sequence_length": 32},
        {"fingerprint": "x"},
        {"split": (90.0, 10.0, 0.0)},
        {"split": (90.0, 10.0, 0.0), "part": 1},
    ]
    keys = {open_samples(tmp_path, pair, **change).key for change in changes}
    folders = [path for path in tmp_path.glob("megatron_*") if path.is_dir()]
    assert len(keys) == len(folders) == len(changes)


def test_indices_are_built_once_for_a_machine(tmp_path, monkeypatch):
    pair = IndexedTokens(GOLDEN_PAIRS / "docsA_uint16")
    first = open_samples(tmp_path, pair).indices.shuffle.tolist()
    blend = [array.tolist() for array in cached_blend([0.7, 0.3], num_samples=50, cache_dir=tmp_path)]
    for name in ("build_indices", "blend_index"):
        monkeypatch.setattr(megatron_samples, name, None)
    assert open_samples(tmp_path, pair).indices.shuffle.tolist() == first
    assert [array.tolist() for array in cached_blend([0.7, 0.3], num_samples=50, cache_dir=tmp_path)] == blend


def test_a_position_behind_the_last_sample(tmp_path):
    samples = open_samples(tmp_path, IndexedTokens(GOLDEN_PAIRS / "docsA_uint16"))
    with pytest.raises(DataError, match=r"299 samples in Megatron's order\n.*sample 299"):
        samples.order(np.asarray([298, 299]))
    assert samples.endless_order(np.asarray([299])).tolist() == samples.order(np.asarray([0])).tolist()


def test_a_part_without_a_sample_is_refused(tmp_path):
    pair = write_pair(tmp_path / "pair", [[1, 2, 3]] * 10)
    with pytest.raises(DataError, match="3 tokens in sequences 9 to 9, part 1"):
        open_samples(tmp_path, pair, split=(90.0, 10.0, 0.0), part=1)
