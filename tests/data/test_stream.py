import numpy as np
import pytest

from nvfp4_train.data.order import PrefixStableOrder
from nvfp4_train.data.packing import PackedTokens
from nvfp4_train.data.source import SourceTokens
from nvfp4_train.data.stream import SequenceStream
from tests.support.token_files import write_pair

NUM_SAMPLES = 37


@pytest.fixture
def packed(tmp_path):
    pair = write_pair(tmp_path / "pair", [list(range(1 + 2 * NUM_SAMPLES))])
    return PackedTokens(SourceTokens([pair]), sequence_length=2, vocab_size=100)


def sequences(packed, *, seed):
    return SequenceStream(packed, order=PrefixStableOrder(num_samples=packed.num_samples, seed=seed))


def first_tokens(stream, first, count):
    return stream.read(first, count).tokens[:, 0].tolist()


def test_each_epoch_reads_every_sample_once(packed):
    stream = sequences(packed, seed=1)
    epochs = [first_tokens(stream, epoch * NUM_SAMPLES, NUM_SAMPLES) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(0, 2 * NUM_SAMPLES, 2)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_what_stands_at_a_position_does_not_depend_on_earlier_reads(packed, monkeypatch):
    whole = first_tokens(sequences(packed, seed=1), 0, 100)
    monkeypatch.setattr("nvfp4_train.data.stream._BLOCK", 8)
    stream = sequences(packed, seed=1)
    for first, count in ((90, 10), (0, 3), (3, 9), (40, 1), (5, 2), (99, 1)):
        assert first_tokens(stream, first, count) == whole[first : first + count]


def test_another_seed_is_another_order(packed):
    orders = [first_tokens(sequences(packed, seed=seed), 0, NUM_SAMPLES) for seed in (1, 2)]
    assert orders[0] != orders[1]
    assert np.array_equal(np.sort(orders[0]), np.sort(orders[1]))
