"""A process that turns records into token ids, and the pool of them that keeps the order of the records."""

import multiprocessing
import os
import queue
import signal
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType

import numpy as np

from nvfp4_train.data.encoders.base import Encoder
from nvfp4_train.data.encoders.load import EncoderSpec, load_encoder
from nvfp4_train.data.error import DataError
from nvfp4_train.data.sources.record import Cursor, RecordBatch, RecordError, parse_batch

_IN_FLIGHT = 2  # batches that a worker has: one that it encodes and one that waits


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """What a worker does.

    Args:
        encoder: Tokenizer.
        dtype: dtype of the ids.
        append_end: Whether each document ends with the end-of-document token.
    """

    encoder: EncoderSpec
    dtype: str
    append_end: bool


@dataclass(frozen=True, kw_only=True)
class EncodedBatch:
    """The documents of a batch.

    Args:
        tokens: [N] ids of all documents, end to end.
        lengths: [D] int64, tokens of each document.
        digests: Hash of each document's text.
        num_empty: Records without text.
        errors: Records that cannot be used.
        cursor: Where reading goes on.
        fraction: Share of the source that has been read; None where that is not known.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    digests: list[bytes]
    num_empty: int
    errors: list[RecordError]
    cursor: Cursor
    fraction: float | None


def encode_batch(batch: RecordBatch, encoder: Encoder, spec: WorkerSpec) -> EncodedBatch:
    """Parse and encode a batch.

    Raises:
        DataError: A document has 2^31 tokens or more, or an id that its tokenizer does not declare.
    """
    parsed = parse_batch(batch)
    encoded = encoder.encode(parsed.texts)
    end = np.asarray([encoder.end_of_document] if spec.append_end else [], dtype=np.int32)
    pieces = [piece for ids in encoded for piece in (ids, end)]
    tokens = np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int32)
    lengths = np.asarray([len(ids) + len(end) for ids in encoded], dtype=np.int64)
    if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < encoder.vocab_size:
        raise DataError(
            batch.place, found=f"token ids from {tokens.min()} to {tokens.max()}",
            expected=f"ids from 0 to {encoder.vocab_size - 1} of {encoder.name}", fix="check the tokenizer",
        )  # fmt: skip
    return EncodedBatch(
        tokens=tokens.astype(spec.dtype),
        lengths=lengths,
        digests=parsed.digests,
        num_empty=parsed.num_empty,
        errors=parsed.errors,
        cursor=batch.cursor,
        fraction=batch.fraction,
    )


class WorkerPool:
    """Processes that encode batches; results come in the order of the batches, whatever the number of processes.

    Workers end when the process that started them does, however it ends, and ignore Ctrl-C and SIGTERM, so that it can
    still save what is done.

    Args:
        spec: What they do.
        num_workers: How many there are.
    """

    def __init__(self, spec: WorkerSpec, *, num_workers: int) -> None:
        # A spawned process inherits no pipe, so each one sees the end of its own when we are gone.
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(num_workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, spec), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()

    def encode(self, batches: Iterator[RecordBatch]) -> Iterator[EncodedBatch]:
        """Yield the encoded batches in order, reading ``batches`` a little ahead.

        Raises:
            DataError: A batch cannot be encoded, or a worker was killed.
        """
        waiting: deque[int] = deque()  # workers that owe a result, in the order of the batches
        turn = 0
        for batch in batches:
            if len(waiting) == _IN_FLIGHT * len(self._pipes):
                yield self._receive(waiting.popleft())
            self._send(turn, batch)
            waiting.append(turn)
            turn = (turn + 1) % len(self._pipes)
        while waiting:
            yield self._receive(waiting.popleft())

    def _send(self, worker: int, batch: RecordBatch) -> None:
        try:
            self._pipes[worker].send(batch)
        except OSError as error:
            raise self._died(worker) from error

    def _receive(self, worker: int) -> EncodedBatch:
        try:
            result = self._pipes[worker].recv()
        except (EOFError, OSError) as error:
            raise self._died(worker) from error
        if isinstance(result, BaseException):
            raise result
        assert isinstance(result, EncodedBatch)
        return result

    def _died(self, worker: int) -> DataError:
        self._processes[worker].join(timeout=10)
        return DataError(
            f"worker {worker}", found=f"it ended with exit code {self._processes[worker].exitcode}",
            expected="it to live", fix="check memory and use fewer workers; the same command goes on from here",
        )  # fmt: skip


def _work(pipe: Connection, spec: WorkerSpec) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # One core a worker: the number of workers is what the user chooses. The library reads it at its first batch.
    os.putenv("TOKENIZERS_PARALLELISM", "false")
    batches: queue.SimpleQueue[RecordBatch | None] = queue.SimpleQueue()
    # The thread takes batches out of the pipe while we encode, so that sending to us never waits for our results.
    threading.Thread(target=_receive_all, args=(pipe, batches), daemon=True).start()
    try:
        encoder = load_encoder(spec.encoder)
        while (batch := batches.get()) is not None:
            try:
                result: EncodedBatch | Exception = encode_batch(batch, encoder, spec)
            except DataError as error:
                result = error
            pipe.send(result)
    except DataError as error:
        pipe.send(error)
    except OSError:
        return  # whom we worked for is gone


def _receive_all(pipe: Connection, batches: "queue.SimpleQueue[RecordBatch | None]") -> None:
    try:
        while True:
            batches.put(pipe.recv())
    except (EOFError, OSError):
        batches.put(None)
