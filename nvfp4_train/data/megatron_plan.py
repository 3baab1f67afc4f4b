"""Megatron's blend as the plan of a run."""

import numpy as np

from nvfp4_train.data.mixture import Picks

_BLOCK = 1 << 16


class MegatronPlan:
    """Which sample of which source stands at each position, from Megatron's blending indices; see ``Plan``.

    Args:
        sources: [N] int16, source of each sample.
        indices: [N] int64, its index in that source.
        num_sources: S.
    """

    def __init__(self, sources: np.ndarray, indices: np.ndarray, *, num_sources: int) -> None:
        self.end: int | None = len(sources)
        self._sources = sources
        self._indices = indices
        counts = [np.zeros(num_sources, dtype=np.int64)]
        for first in range(0, len(sources), _BLOCK):
            counts.append(counts[-1] + np.bincount(sources[first : first + _BLOCK], minlength=num_sources))
        self._counts = counts

    def given(self, position: int) -> np.ndarray:
        """Return [S] int64: samples that each source has given before ``position``."""
        block = min(max(position, 0), len(self._sources)) // _BLOCK
        rest = self._sources[block * _BLOCK : max(position, 0)]
        return self._counts[block] + np.bincount(rest, minlength=len(self._counts[0]))

    def picks(self, first: int, count: int) -> Picks:
        """Return where the samples at ``first`` to ``first + count - 1`` come from."""
        inside = slice(first, first + count)
        return Picks(sources=self._sources[inside].astype(np.int64), indices=self._indices[inside])
