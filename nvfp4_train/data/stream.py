"""The endless streams of sequences that training and validation read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nvfp4_train.data.batch import IGNORE_INDEX
from nvfp4_train.data.error import DataError
from nvfp4_train.data.plan import UNLIMITED, SamplePlan
from nvfp4_train.data.rows import PackedRows, Samples, finish_rows, read_rows

_BLOCK = 1024  # Positions whose order is computed together, because NumPy's cost per call dominates small arrays.


class SequenceStream:
    """All epochs of one packed source, addressed by one global position.

    What stands at a position depends on the source and its order only, so ranks, batch sizes and restarts only choose
    who reads which positions when.

    Args:
        packed: The source.
        order: Which row is read at each position, [N] int64; for all epochs.
    """

    def __init__(self, packed: Samples, *, order: Callable[[np.ndarray], np.ndarray]) -> None:
        self.num_sequences = packed.num_samples  # of one epoch
        self._packed = packed
        self._order = order
        self._block = (0, np.empty(0, dtype=np.int64))  # first position, samples; replaced whole: threads share it

    def read(self, first: int, count: int) -> PackedRows:
        """Return the sequences at positions ``first`` to ``first + count - 1``."""
        return read_rows(self._packed, self._samples(first, count))

    def _samples(self, first: int, count: int) -> np.ndarray:
        start, samples = self._block
        if first < start or first + count > start + len(samples):
            start = first
            samples = self._order(np.arange(first, first + max(count, _BLOCK), dtype=np.int64))
            self._block = (start, samples)
        return samples[first - start : first - start + count]


@dataclass(frozen=True, kw_only=True)
class Feed:
    """A source as the mixture reads it.

    Args:
        name: Its name.
        samples: Its rows.
        order: Which row it gives k-th, for k [N] int64; for all epochs.
        samples_per_epoch: Rows that hold each of its tokens once.
        fingerprint: Hash of all that decides which tokens it gives k-th.
        limit: Rows that it can give in all.
        counts_loss: Whether its labels count.
    """

    name: str
    samples: Samples
    order: Callable[[np.ndarray], np.ndarray]
    samples_per_epoch: float
    fingerprint: str
    limit: int = UNLIMITED
    counts_loss: bool = True


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where position 0 of a stream is in the run.

    Args:
        tokens: Tokens of the run before it.
        given: Rows that each source gave before it, by name.
    """

    tokens: int
    given: Mapping[str, int]


BEGINNING = Origin(tokens=0, given={})


class MixedStream:
    """The training sequences of a run: several sources, blended by a plan and addressed by one global position.

    Args:
        feeds: The sources.
        plan: Makes the plan that begins at an origin.
    """

    def __init__(self, feeds: Sequence[Feed], *, plan: Callable[[Origin], SamplePlan]) -> None:
        self.feeds = tuple(feeds)
        self.sequence_length = feeds[0].samples.sequence_length
        self._make_plan = plan
        self.begin(BEGINNING)

    def begin(self, origin: Origin) -> None:
        """Let position 0 be ``origin``."""
        self.origin = origin
        self.plan = self._make_plan(origin)
        empty = np.empty(0, dtype=np.int64)
        self._block = (0, empty, empty)  # first position, sources, samples; replaced whole: threads share it

    def given(self, position: int) -> dict[str, int]:
        """Return how many rows each source has given before ``position``, those before the origin included."""
        counts = self.plan.given(position).tolist()
        return {feed.name: count for feed, count in zip(self.feeds, counts, strict=True)}

    def read(self, first: int, count: int) -> PackedRows:
        """Return the sequences at positions ``first`` to ``first + count - 1``.

        Raises:
            DataError: A token id is outside the vocabulary, or no source may be read any further.
        """
        sources, samples = self._picks(first, count)
        shape = (count, self.sequence_length)
        tokens, labels = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int64)
        starts = []
        for row, (source, sample) in enumerate(zip(sources.tolist(), samples.tolist(), strict=True)):
            feed = self.feeds[source]
            starts.append(feed.samples.fill(sample, tokens=tokens[row], labels=labels[row]))
            if not feed.counts_loss:
                labels[row] = IGNORE_INDEX
        return finish_rows(tokens, labels, starts)

    def _picks(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        start, sources, samples = self._block
        if first < start or first + count > start + len(samples):
            start, (sources, samples) = first, self._look_up(first, count)
            self._block = (start, sources, samples)
        inside = slice(first - start, first - start + count)
        return sources[inside], samples[inside]

    def _look_up(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        size = max(count, _BLOCK)
        if self.plan.end is not None:
            if first + count > self.plan.end:
                raise self._exhausted()
            size = min(size, self.plan.end - first)
        picks = self.plan.picks(first, size)
        samples = np.empty_like(picks.indices)
        for source in np.unique(picks.sources).tolist():
            chosen = picks.sources == source
            samples[chosen] = self.feeds[source].order(picks.indices[chosen])
        return picks.sources, samples

    def _exhausted(self) -> DataError:
        names = ", ".join(feed.name for feed in self.feeds)
        end = self.origin.tokens + (self.plan.end or 0) * self.sequence_length
        return DataError(
            f"data.sources ({names})",
            found=f"every source of the blend has been read as often as it may be after {end} tokens of the run",
            expected="sources that last until run.tokens",
            fix="raise max_epochs, add sources, or lower run.tokens",
        )

    def check_lasts(self, run_tokens: int, *, step_tokens: int) -> None:
        """Check that the sources last to the end of a run, its last step included.

        Args:
            run_tokens: Budget of the run.
            step_tokens: Tokens of a step.

        Raises:
            DataError: They do not.
        """
        if self.plan.end is None:
            return
        steps = -(-(run_tokens - self.origin.tokens) // step_tokens)
        if self.plan.end * self.sequence_length < steps * step_tokens:
            raise self._exhausted()
