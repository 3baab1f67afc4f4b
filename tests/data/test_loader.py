import os
import signal
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4_train.data.batch import IGNORE_INDEX, Batch
from nvfp4_train.data.error import DataError
from nvfp4_train.data.loader import Loader, ValidationSet
from nvfp4_train.data.order import PrefixStableOrder
from nvfp4_train.data.packing import PackedTokens
from nvfp4_train.data.source import SourceTokens
from nvfp4_train.data.stream import SequenceStream
from tests.support.token_files import write_pair

LENGTH = 2
NUM_SAMPLES = 29


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    pair = write_pair(tmp_path_factory.mktemp("loader") / "pair", [list(range(1 + LENGTH * NUM_SAMPLES))])
    packed = PackedTokens(SourceTokens([pair]), sequence_length=LENGTH, vocab_size=100)
    return SequenceStream(packed, order=PrefixStableOrder(num_samples=packed.num_samples, seed=4))


def make_loader(stream, *, size, rank=0, degree=1, prefetch=2):
    return Loader(stream, micro_batch_size=size, dp_rank=rank, dp_degree=degree, prefetch=prefetch)


def read_step(stream, *, size, degree, first, count):
    """One step as all ranks together read it, in the order of the global batch."""
    batches = []
    for rank in range(degree):
        loader = make_loader(stream, size=size, rank=rank, degree=degree)
        batches += loader.step_batches(first_sequence=first, num_sequences=count)
        loader.close()
    batches.sort(key=lambda batch: batch.microbatch_index)
    assert [batch.microbatch_index for batch in batches] == list(range(count // size))
    return torch.cat([batch.tokens for batch in batches]).tolist()


@settings(max_examples=25, deadline=None)
@given(
    size=st.integers(1, 4),
    degree=st.integers(1, 4),
    rounds=st.integers(1, 3),
    first=st.integers(0, 80),
)
def test_ranks_together_read_the_stream_of_one_rank(stream, size, degree, rounds, first):
    count = size * degree * rounds
    together = read_step(stream, size=size, degree=degree, first=first, count=count)
    assert together == stream.read(first, count).tokens.tolist()


@settings(max_examples=25, deadline=None)
@given(plan=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=5))
def test_restarts_with_other_batches_and_ranks_neither_repeat_nor_skip(stream, plan):
    read, cursor = [], 0
    for size, degree, rounds in plan:  # a restart at each entry
        count = size * degree * rounds
        read += read_step(stream, size=size, degree=degree, first=cursor, count=count)
        cursor += count
    assert read == stream.read(0, cursor).tokens.tolist()


@pytest.mark.parametrize("prefetch", [0, 1, 3, 10])
def test_prefetch_changes_nothing(stream, prefetch):
    loader = make_loader(stream, size=2, rank=1, degree=2, prefetch=prefetch)
    # Steps of growing size (a ramp), a jump back (a resume), a jump ahead.
    for first, count in ((0, 4), (4, 4), (8, 8), (16, 12), (4, 4), (100, 8), (108, 4)):
        batches = loader.step_batches(first_sequence=first, num_sequences=count)
        for index, batch in zip(range(1, count // 2, 2), batches, strict=True):
            assert batch.microbatch_index == index
            assert batch.tokens.tolist() == stream.read(first + 2 * index, 2).tokens.tolist()
    loader.close()


@pytest.mark.parametrize("degree", [1, 2])
def test_next_step_is_read_ahead(stream, degree):
    loader = make_loader(stream, size=2, rank=degree - 1, degree=degree, prefetch=3)
    loader.step_batches(first_sequence=0, num_sequences=4 * degree)
    ahead = [future.result().tokens.tolist() for _, future in loader._ahead]
    following = loader.step_batches(first_sequence=4 * degree, num_sequences=6 * degree)
    assert [batch.tokens.tolist() for batch in following] == ahead
    loader.close()


class FailingStream:
    """Fails from one position on, like a file that is damaged there."""

    num_sequences = 100

    def __init__(self, stream, bad):
        self.stream = stream
        self.bad = bad

    def read(self, first, count):
        if first >= self.bad:
            raise DataError("some.bin", found="damage", expected="tokens", fix="copy it again")
        return self.stream.read(first, count)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_failure_of_the_thread_reaches_the_caller_of_that_batch(stream, prefetch):
    loader = make_loader(FailingStream(stream, bad=4), size=2, prefetch=prefetch)
    loader.step_batches(first_sequence=0, num_sequences=4)
    with pytest.raises(DataError, match="damage"):
        loader.step_batches(first_sequence=4, num_sequences=4)
    loader.close()


def test_the_thread_leaves_signals_to_the_trainer(stream):
    loader = make_loader(stream, size=1, prefetch=2)
    loader.step_batches(first_sequence=0, num_sequences=1)
    blocked = loader._thread.submit(lambda: signal.pthread_sigmask(signal.SIG_BLOCK, set())).result()
    assert {signal.SIGINT, signal.SIGTERM} <= blocked
    assert not {signal.SIGINT, signal.SIGTERM} & signal.pthread_sigmask(signal.SIG_BLOCK, set())
    loader.close()


def test_reading_goes_on_when_the_program_is_asked_to_stop(stream):
    asked = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    loader = make_loader(stream, size=2, prefetch=3)
    try:
        for first in range(0, 40, 4):
            os.kill(os.getpid(), signal.SIGTERM)
            batches = loader.step_batches(first_sequence=first, num_sequences=4)
            expected = stream.read(first, 4).tokens.tolist()
            assert torch.cat([batch.tokens for batch in batches]).tolist() == expected
    finally:
        signal.signal(signal.SIGTERM, before)
        loader.close()
    assert asked


def test_pinned_batches_are_pinned_by_whoever_read_them(stream, monkeypatch):
    pinned_by = []
    monkeypatch.setattr(Batch, "pin_memory", lambda self: pinned_by.append(threading.current_thread().name) or self)
    loader = make_loader(stream, size=2, prefetch=2)
    loader.pin_memory()
    loader.step_batches(first_sequence=0, num_sequences=6)
    loader.close()
    # The first batch was not read ahead; whatever was is pinned by the thread that read it.
    assert pinned_by.count("MainThread") == 1
    assert sum(name.startswith("data") for name in pinned_by) == len(pinned_by) - 1 >= 2


def test_close_ends_the_thread(stream):
    loader = make_loader(stream, size=1, prefetch=4)
    loader.step_batches(first_sequence=0, num_sequences=1)
    (thread,) = loader._thread._threads
    assert thread.is_alive()
    loader.close()
    assert thread not in threading.enumerate()


@pytest.mark.parametrize("count", [0, 3, -4])
def test_uneven_step_is_refused(stream, count):
    loader = make_loader(stream, size=2, degree=2)
    with pytest.raises(ValueError, match=r"microbatches of 2 on 2 ranks; expected a multiple of 4"):
        loader.step_batches(first_sequence=0, num_sequences=count)
    loader.close()


def counted_rows(stream, *, degree, size, count):
    """Rows with a label that counts, over all ranks, in global order."""
    batches = []
    for rank in range(degree):
        validation = ValidationSet(stream, dp_rank=rank, dp_degree=degree)
        mine = list(validation.batches(num_sequences=count, micro_batch_size=size))
        again = list(validation.batches(num_sequences=count, micro_batch_size=size))
        assert all(torch.equal(a.labels, b.labels) for a, b in zip(mine, again, strict=True))
        assert all(batch.tokens.shape == (size, LENGTH) for batch in mine)
        batches.append(mine)
    assert len({len(mine) for mine in batches}) == 1  # collectives need as many calls on every rank
    flat = sorted((batch for mine in batches for batch in mine), key=lambda batch: batch.microbatch_index)
    labels = torch.cat([batch.labels for batch in flat])
    return labels[(labels != IGNORE_INDEX).any(dim=1)].tolist()


@pytest.mark.parametrize("count", [1, 5, 8, 1000])
def test_validation_reads_the_same_rows_whatever_the_ranks_and_batches(stream, count):
    expected = stream.read(0, min(count, NUM_SAMPLES)).labels.tolist()
    for degree, size in ((1, 1), (1, 3), (2, 2), (3, 4)):
        assert counted_rows(stream, degree=degree, size=size, count=count) == expected


def test_validation_of_all_rows_is_the_whole_set(stream):
    rows = counted_rows(stream, degree=2, size=3, count=NUM_SAMPLES)
    assert np.array_equal(np.sort(np.ravel(rows)), np.arange(1, 1 + LENGTH * NUM_SAMPLES))
