"""The order in which samples are read: a keyed permutation of each epoch, computed on the fly.

Sample i of epoch e is a pure function of (seed, e, i). No index is stored, and nothing depends on how long a run is,
how many ranks read or how large a batch is, so a longer run starts as the shorter one and a cursor is one integer.
"""

import hashlib

import numpy as np

_ROUNDS = 6  # Four rounds of a Feistel network are pseudo-random for an ideal round function; two more for a cheap one.
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


class PrefixStableOrder:
    """The order of one source, for all epochs.

    Args:
        num_samples: Samples of one epoch.
        seed: Seed of the order.
    """

    def __init__(self, *, num_samples: int, seed: int | str) -> None:
        self._num_samples = num_samples
        self._seed = seed

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Return the sample that is read at each position, [N] int64."""
        return sample_order(positions, num_samples=self._num_samples, seed=self._seed)


def sample_order(positions: np.ndarray, *, num_samples: int, seed: int | str) -> np.ndarray:
    """Return the sample that is read at each position of the endless stream of epochs.

    Args:
        positions: [N] int64, position in the stream, not negative; epoch e holds positions ``e * num_samples`` onwards.
        num_samples: Samples of one epoch.
        seed: Seed of the order.

    Returns:
        [N] int64, sample index in ``[0, num_samples)``.
    """
    positions = np.asarray(positions, dtype=np.int64)
    epochs, offsets = np.divmod(positions, num_samples)
    samples = np.empty_like(positions)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        samples[chosen] = permute(offsets[chosen], size=num_samples, keys=_round_keys(seed, int(epoch)))
    return samples


def permute(values: np.ndarray, *, size: int, keys: np.ndarray) -> np.ndarray:
    """Apply a keyed permutation of ``range(size)``.

    A balanced Feistel network permutes the next power of four; values that leave the range walk along their cycle until
    they are back, which keeps the map one to one.

    Args:
        values: [N] int64 in ``[0, size)``.
        size: Size of the permuted range, up to 2^62.
        keys: [R] uint64, one key a round.

    Returns:
        [N] int64 in ``[0, size)``.

    Source: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002 (cycle walking).
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    result = _feistel(values.astype(np.uint64), half_bits=half_bits, keys=keys)
    outside = np.flatnonzero(result >= size)
    while outside.size:
        result[outside] = _feistel(result[outside], half_bits=half_bits, keys=keys)
        outside = outside[result[outside] >= size]
    return result.astype(np.int64)


def _feistel(values: np.ndarray, *, half_bits: int, keys: np.ndarray) -> np.ndarray:
    shift = np.uint64(half_bits)
    mask = np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (mix(right ^ key) & mask)
    return (left << shift) | right


def mix(words: np.ndarray) -> np.ndarray:
    """Return a hash of each word: one to one on [N] uint64, every bit of the result depends on every bit of the word.

    Source: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014 (SplitMix64's finalizer).
    """
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    return words ^ (words >> np.uint64(31))


def _round_keys(seed: int | str, epoch: int) -> np.ndarray:
    digest = hashlib.blake2b(f"order/{seed}/{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8")
