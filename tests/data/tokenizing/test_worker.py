import os
import signal
import time

import numpy as np
import pytest

from nvfp4_train.data.encoders.load import EncoderSpec, load_encoder
from nvfp4_train.data.error import DataError
from nvfp4_train.data.sources.record import RecordBatch, RecordKind
from nvfp4_train.data.tokenizing.worker import WorkerPool, WorkerSpec, encode_batch

BYTES = WorkerSpec(encoder=EncoderSpec(name="bytes"), dtype="<u2", append_end=True)


def batch(*records, number=0):
    return RecordBatch(
        place="p", kind=RecordKind.value, column="text", first=1, records=list(records), cursor={"n": number},
        fraction=0.5,
    )  # fmt: skip


def encode(*records, **changes):
    spec = WorkerSpec(**{"encoder": BYTES.encoder, "dtype": "<u2", "append_end": True} | changes)
    return encode_batch(batch(*records), load_encoder(spec.encoder), spec)


def test_documents_end_to_end():
    encoded = encode("ab", "", None, "c")
    assert encoded.tokens.tolist() == [97, 98, 256, 99, 256]
    assert encoded.tokens.dtype == np.uint16
    assert encoded.lengths.tolist() == [3, 2]
    assert (encoded.num_empty, len(encoded.errors), len(encoded.digests)) == (1, 1, 2)
    assert (encoded.cursor, encoded.fraction) == ({"n": 0}, 0.5)


def test_without_end():
    assert encode("ab", append_end=False).tokens.tolist() == [97, 98]


def test_batch_without_documents():
    encoded = encode("", None)
    assert (encoded.tokens.size, encoded.lengths.size) == (0, 0)


def test_ids_that_the_tokenizer_does_not_declare_are_refused():
    encoder = load_encoder(BYTES.encoder)
    encoder.vocab_size = 100
    with pytest.raises(DataError, match="token ids from 97 to 256"):
        encode_batch(batch("a"), encoder, BYTES)


def many(count):
    # Batches of very different sizes, larger than a pipe holds.
    return [batch(*["word " * (1 + (number * 7919) % 40_000)] * 2, number=number) for number in range(count)]


@pytest.mark.parametrize("num_workers", [1, 3])
def test_results_come_in_order(num_workers):
    batches = many(12)
    with WorkerPool(BYTES, num_workers=num_workers) as pool:
        results = list(pool.encode(iter(batches)))
    assert [result.cursor["n"] for result in results] == list(range(12))
    for given, result in zip(batches, results, strict=True):
        assert result.lengths.tolist() == [len(text) + 1 for text in given.records]


def test_reading_ahead_is_bounded():
    read = []

    def reading():
        for item in many(30):
            read.append(item)
            yield item

    with WorkerPool(BYTES, num_workers=2) as pool:
        results = pool.encode(reading())
        next(results)
        assert len(read) == 5  # two for each worker, and the one that made room


def test_errors_of_a_worker_reach_the_caller(tmp_path):
    spec = WorkerSpec(encoder=EncoderSpec(name=str(tmp_path / "missing.json")), dtype="<u2", append_end=True)
    with WorkerPool(spec, num_workers=1) as pool, pytest.raises(DataError, match="nothing there"):
        list(pool.encode(iter(many(3))))


def test_a_killed_worker_is_named():
    with WorkerPool(BYTES, num_workers=2) as pool:
        results = pool.encode(iter(many(30)))
        next(results)
        os.kill(pool._processes[1].pid, signal.SIGKILL)
        with pytest.raises(DataError, match="exit code -9"):
            list(results)


def test_workers_ignore_signals_and_end_with_the_pool():
    with WorkerPool(BYTES, num_workers=1) as pool:
        results = pool.encode(iter(many(8)))
        next(results)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pool._processes[0].pid, number)
        assert len(list(results)) == 7
    deadline = time.monotonic() + 10
    while any(process.is_alive() for process in pool._processes):
        assert time.monotonic() < deadline
        time.sleep(0.05)
