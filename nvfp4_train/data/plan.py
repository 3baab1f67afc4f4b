"""How the blend of a run changes: at the ends of its phases, and where a source has been read as often as it may be."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from nvfp4_train.data.mixture import Blend, Picks

UNLIMITED = np.iinfo(np.int64).max


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A blend and where it ends.

    Args:
        name: For messages.
        end: Position of the sample that follows it; None has no end.
        weights: [S], share of each source.
    """

    name: str
    end: int | None
    weights: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class _Segment:
    """A stretch with one blend; ``given`` is what each source has given before ``start``."""

    start: int
    given: np.ndarray
    blend: Blend


class SamplePlan(Protocol):
    """Which sample of which source stands at each position of a run.

    Attributes:
        end: Position from which on there is nothing more to read; None for no end.
    """

    end: int | None

    def given(self, position: int) -> np.ndarray:
        """Return [S] int64: samples that each source has given before ``position``, those before 0 included."""
        ...

    def picks(self, first: int, count: int) -> Picks:
        """Return where the samples at ``first`` to ``first + count - 1`` come from."""
        ...


class Plan:
    """Which sample of which source stands at each position of a run.

    A pure function of the position, found from a handful of numbers: one segment for each phase, and one more for each
    source that reaches its limit.

    Args:
        phases: In their order; the last one should have no end.
        given: [S] samples that each source has given before position 0.
        limits: [S] samples that each source can give in all; UNLIMITED for no limit.
    """

    def __init__(self, phases: Sequence[Phase], *, given: Sequence[int], limits: Sequence[int]) -> None:
        self._segments: list[_Segment] = []
        self.end: int | None = None  # position from which on there is nothing more to read
        limit = np.asarray(limits, dtype=np.int64)
        counts = self._given = np.asarray(given, dtype=np.int64)
        position = 0
        for phase in phases:
            while phase.end is None or position < phase.end:
                weights = np.where(counts < limit, phase.weights, 0.0)
                if not weights.any():
                    self.end = position
                    return
                segment = _Segment(start=position, given=counts, blend=Blend(weights.tolist()))
                self._segments.append(segment)
                end = _first_exhausted(segment, limit)
                if phase.end is not None:
                    end = phase.end if end is None else min(end, phase.end)
                if end is None:
                    return
                counts = counts + segment.blend.counts(end - position)
                position = end
        self.end = position

    def given(self, position: int) -> np.ndarray:
        """Return [S] int64: samples that each source has given before ``position``, those before 0 included."""
        if not self._segments:
            return self._given
        segment = self._segments[self._index(max(position, 0))]
        return segment.given + segment.blend.counts(position - segment.start)

    def picks(self, first: int, count: int) -> Picks:
        """Return where the samples at ``first`` to ``first + count - 1`` come from.

        Raises:
            IndexError: They lie beyond ``end``.
        """
        if self.end is not None and first + count > self.end:
            raise IndexError(f"samples {first} to {first + count - 1} of a plan of {self.end}")
        sources, indices = [], []
        last = first + count
        while first < last:
            index = self._index(first)
            segment = self._segments[index]
            following = self._segments[index + 1].start if index + 1 < len(self._segments) else last
            picks = segment.blend.picks(first - segment.start, min(following, last) - first)
            sources.append(picks.sources)
            indices.append(picks.indices + segment.given[picks.sources])
            first += len(picks.sources)
        return Picks(sources=np.concatenate(sources), indices=np.concatenate(indices))

    def _index(self, position: int) -> int:
        return bisect_right(self._segments, position, key=lambda segment: segment.start) - 1


def _first_exhausted(segment: _Segment, limit: np.ndarray) -> int | None:
    """Return the position that follows the last sample of the first source that reaches its limit."""
    ends = [
        segment.start + segment.blend.position_of(source, int(limit[source] - segment.given[source]) - 1) + 1
        for source in np.flatnonzero((segment.blend.weights > 0) & (limit < UNLIMITED)).tolist()
    ]
    return min(ends, default=None)
