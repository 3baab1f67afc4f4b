"""Which source each sample of a run comes from: a greedy blend that can be entered anywhere.

Sample i goes to the source with the smallest ``(count + 1/2) / weight``: the one that is furthest behind its share
(Sainte-Lague's method). Sample j of source s therefore has the fixed time ``(j + 1/2) / weight_s``, and the blend is
all samples in the order of their times. How many samples each source has given before position i follows from i alone:
no list of a run's samples is kept, whatever its length, and a longer run starts as the shorter one.

A source is never further from its share than ``1/2 + S * weight / 2`` samples, S the number of sources.

Source: Balinski and Young, "Fair Representation", 1982 (Webster's method as a divisor method).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Picks:
    """Where some consecutive samples of a blend come from.

    Args:
        sources: [N] int64, index of the source.
        indices: [N] int64, how many samples that source has given before.
    """

    sources: np.ndarray
    indices: np.ndarray


class Blend:
    """An endless greedy blend of sources.

    Args:
        weights: Share of each source, not negative, not all 0; they need not sum to 1.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        total = math.fsum(weights)
        self._num_sources = len(weights)
        self._used = np.flatnonzero(np.asarray(weights, dtype=np.float64))
        self._weights = np.asarray([weight / total for weight in weights if weight], dtype=np.float64)

    @property
    def weights(self) -> np.ndarray:
        """[S] float64, shares that sum to 1."""
        shares = np.zeros(self._num_sources)
        shares[self._used] = self._weights
        return shares

    def counts(self, position: int) -> np.ndarray:
        """Return [S] int64: how many of the first ``position`` samples each source gives."""
        counts = np.zeros(self._num_sources, dtype=np.int64)
        counts[self._used] = self._counts(position)
        return counts

    def picks(self, first: int, count: int) -> Picks:
        """Return where the samples ``first`` to ``first + count - 1`` come from."""
        start = self._counts(first)
        sources, indices = self._following(start, count)
        return Picks(sources=self._used[sources], indices=indices)

    def position_of(self, source: int, index: int) -> int:
        """Return the position of sample ``index`` of a source whose weight is not 0."""
        own = int(np.searchsorted(self._used, source))
        time = (index + 0.5) / self._weights[own]
        before = self._counts_until(time, inclusive=False)
        ties = self._counts_until(time, inclusive=True)[:own] - before[:own]
        return int(before.sum() + ties.sum())

    def _counts(self, position: int) -> np.ndarray:
        # Each source is within half a sample of its share of a time, all together within S/2 of the time itself. At
        # this time fewer than ``position`` samples have been given, and few are missing.
        counts = self._counts_until(position - len(self._weights) / 2 - 1, inclusive=True)
        missing = position - int(counts.sum())
        sources, _ = self._following(counts, missing)
        return counts + np.bincount(sources, minlength=len(counts))

    def _counts_until(self, time: float, *, inclusive: bool) -> np.ndarray:
        """Return the samples of each source whose time is below ``time`` (or equal to it).

        The rounded times themselves decide, so that every question about the blend has the same answer.
        """
        counts = np.maximum(np.floor(self._weights * time + 0.5), 0).astype(np.int64)

        def given(index: np.ndarray) -> np.ndarray:
            times = self._times(index)
            return (times <= time) if inclusive else (times < time)

        while (late := (counts > 0) & ~given(counts - 1)).any():
            counts -= late
        while (early := given(counts)).any():
            counts += early
        return counts

    def _following(self, counts: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return sources and indices of the ``number`` samples that follow when ``counts`` have been given."""
        # A source gives at most its share of the next samples, and 1/2 + S/2 samples that it is behind at both ends.
        each = np.minimum(np.ceil(self._weights * (number + len(counts) + 2)).astype(np.int64) + 2, number)
        sources = np.repeat(np.arange(len(counts)), each)
        indices = np.arange(each.sum()) - np.repeat(np.cumsum(each) - each, each) + counts[sources]
        times = (indices + 0.5) / self._weights[sources]
        order = np.lexsort((sources, times))[:number]
        return sources[order], indices[order]

    def _times(self, indices: np.ndarray) -> np.ndarray:
        return (indices + 0.5) / self._weights
