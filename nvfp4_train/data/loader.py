"""Hand each rank its microbatches of a step, read ahead by a background thread."""

import signal
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

import numpy as np

from nvfp4_train.data.batch import IGNORE_INDEX, Batch
from nvfp4_train.data.rows import PackedRows
from nvfp4_train.data.stream import SequenceStream


class Sequences(Protocol):
    """Sequences addressed by one global position."""

    def read(self, first: int, count: int) -> PackedRows:
        """Return the sequences at positions ``first`` to ``first + count - 1``."""
        ...


class Loader:
    """The training batches of one rank; what it returns is a pure function of the arguments of the call.

    Global microbatch j of a step holds the sequences ``first + j * B`` onwards and goes to rank ``j % dp_degree``. A
    rank's microbatches are therefore ``B * dp_degree`` sequences apart, across the borders of steps too, whatever the
    size of a step: the thread reads on along that row, and a call that continues the last one finds its batches ready.

    The thread handles no signals: what asks the program to stop reaches the trainer, which saves first.

    Args:
        stream: Where sequences come from.
        micro_batch_size: B, sequences of a microbatch.
        dp_rank: Index of this rank among those that read different data.
        dp_degree: Number of such ranks.
        prefetch: Microbatches to read ahead; 0 reads in line.
    """

    def __init__(
        self, stream: Sequences, *, micro_batch_size: int, dp_rank: int, dp_degree: int, prefetch: int
    ) -> None:
        self._stream = stream
        self._size = micro_batch_size
        self._rank = dp_rank
        self._degree = dp_degree
        self._prefetch = prefetch
        self._pin_memory = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="data", initializer=_ignore_signals)
        self._ahead: deque[tuple[int, Future[Batch]]] = deque()  # first sequence, its rows

    def pin_memory(self) -> None:
        """Let batches be in pinned memory from now on, from which a copy to a CUDA device does not block."""
        self._pin_memory = True

    def step_batches(self, *, first_sequence: int, num_sequences: int) -> list[Batch]:
        """Return this rank's microbatches of a step.

        Args:
            first_sequence: Position of the step's first sequence in the stream; the same on every rank.
            num_sequences: Sequences of the step over all ranks.

        Raises:
            ValueError: ``num_sequences`` does not split evenly.
            DataError: The data holds something that the model cannot read.
        """
        share = self._size * self._degree
        if num_sequences <= 0 or num_sequences % share:
            raise ValueError(
                f"a step of {num_sequences} sequences does not split into microbatches of {self._size} "
                f"on {self._degree} ranks; expected a multiple of {share}"
            )
        batches = []
        for index in range(self._rank, num_sequences // self._size, self._degree):
            batch = self._next(first_sequence + index * self._size)
            batches.append(replace(batch, microbatch_index=index))
        return batches

    def close(self) -> None:
        """Stop reading ahead and end the thread."""
        self._ahead.clear()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _next(self, first: int) -> Batch:
        if self._ahead and self._ahead[0][0] != first:
            self._drop_ahead()
        waiting = self._ahead.popleft()[1] if self._ahead else None
        self._read_ahead(first)
        return waiting.result() if waiting else self._read(first)

    def _read(self, first: int) -> Batch:
        batch = self._stream.read(first, self._size).batch(microbatch_index=0)
        return batch.pin_memory() if self._pin_memory else batch

    def _read_ahead(self, current: int) -> None:
        following = self._ahead[-1][0] if self._ahead else current
        while len(self._ahead) < self._prefetch:
            following += self._size * self._degree
            self._ahead.append((following, self._thread.submit(self._read, following)))

    def _drop_ahead(self) -> None:
        for _, future in self._ahead:
            future.cancel()
        self._ahead.clear()


class ValidationSet:
    """The validation batches of one rank: the same sequences every time, whatever the number of ranks.

    Args:
        stream: Validation sequences; the first epoch's order makes any number of them a fair sample.
        dp_rank: Index of this rank among those that read different data.
        dp_degree: Number of such ranks.
    """

    def __init__(self, stream: SequenceStream, *, dp_rank: int, dp_degree: int) -> None:
        self.num_sequences = stream.num_sequences
        self._stream = stream
        self._rank = dp_rank
        self._degree = dp_degree

    def batches(self, *, num_sequences: int, micro_batch_size: int) -> Iterator[Batch]:
        """Yield this rank's microbatches of the first ``num_sequences`` sequences, or of all where there are fewer.

        Every rank yields as many batches of the same shape; rows beyond the last sequence count no labels.

        Args:
            num_sequences: Sequences over all ranks.
            micro_batch_size: Sequences of a batch.
        """
        wanted = min(num_sequences, self.num_sequences)
        rounds = -(-wanted // (micro_batch_size * self._degree))
        for index in range(self._rank, rounds * self._degree, self._degree):
            first = index * micro_batch_size
            rows = self._stream.read(first, micro_batch_size)
            rows.labels[np.arange(first, first + micro_batch_size) >= wanted] = IGNORE_INDEX
            yield rows.batch(microbatch_index=index)


def _ignore_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
