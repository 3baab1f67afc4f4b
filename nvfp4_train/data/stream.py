"""The endless stream of sequences that training reads: epoch after epoch, each in its own order."""

import numpy as np

from nvfp4_train.data.order import sample_order
from nvfp4_train.data.packing import PackedRows, PackedTokens

_BLOCK = 4096  # Positions whose order is computed together, because NumPy's cost per call dominates small arrays.


class SequenceStream:
    """All epochs of a packed source, addressed by one global position.

    What stands at a position depends on the source and the seed only, so ranks, batch sizes and restarts only choose
    who reads which positions when.

    Args:
        packed: The source.
        seed: Seed of the order.
    """

    def __init__(self, packed: PackedTokens, *, seed: int) -> None:
        self.num_sequences = packed.num_samples  # of one epoch
        self._packed = packed
        self._seed = seed
        self._block = (0, np.empty(0, dtype=np.int64))  # first position, samples; replaced whole: threads share it

    def read(self, first: int, count: int) -> PackedRows:
        """Return the sequences at positions ``first`` to ``first + count - 1``."""
        return self._packed.read(self._samples(first, count))

    def _samples(self, first: int, count: int) -> np.ndarray:
        start, samples = self._block
        if first < start or first + count > start + len(samples):
            start = first
            positions = np.arange(first, first + max(count, _BLOCK), dtype=np.int64)
            samples = sample_order(positions, num_samples=self.num_sequences, seed=self._seed)
            self._block = (start, samples)
        return samples[first - start : first - start + count]
