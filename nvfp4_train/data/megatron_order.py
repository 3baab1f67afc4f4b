"""Megatron-LM's order, exactly: its document, sample, shuffle and blending indices.

For those who continue a Megatron run. Unlike the prefix-stable order it depends on how many samples are asked for.
The unit is the sequence of a ``.bin/.idx`` pair, which Megatron calls a document here.

Source: Megatron-LM, ``megatron/core/datasets`` (gpt_dataset, blended_dataset), behaviour as of megatron-core 0.16.1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

_SEPARATE_BELOW = 0.80  # a last epoch that gives less than this share of its samples is shuffled by itself
_SURPLUS = 0.005  # share of samples that a source of a blend is asked for in excess


@dataclass(frozen=True, kw_only=True)
class MegatronIndices:
    """Megatron's indices of one source.

    Args:
        documents: [E * NS] int32, sequences in the order in which they are laid end to end.
        samples: [N + 1, 2] int32 (int64 where values need it): entry of ``documents`` and token in that sequence at
            which each sample begins.
        shuffle: [N] uint32 (int64 where values need it): sample that is read at each position.
    """

    documents: np.ndarray
    samples: np.ndarray
    shuffle: np.ndarray


def split_bounds(shares: Sequence[float], num_sequences: int) -> list[tuple[int, int]]:
    """Return the first sequence, and the one behind the last, of each part of a split in file order."""
    total = sum(shares)
    ends = [0.0]
    for share in shares:
        ends.append(ends[-1] + share / total)
    bounds = [round(end * float(num_sequences)) for end in ends]
    return list(pairwise(bounds))


def build_indices(
    lengths: np.ndarray, *, first: int, num_samples: int | None, sequence_length: int, seed: int, extra_token: bool
) -> MegatronIndices:
    """Build the indices of one part of one source.

    Args:
        lengths: [NS] tokens of each sequence of the part.
        first: Number of its first sequence in the file.
        num_samples: Samples that are asked for; None for one epoch.
        sequence_length: S.
        seed: Megatron's seed.
        extra_token: Whether a sample holds the label of its last token.
    """
    per_epoch = int(lengths.sum(dtype=np.int64))
    extra = int(extra_token)
    epochs = 1 if num_samples is None else max(1, -(-(num_samples * sequence_length + extra) // per_epoch))
    total = (epochs * per_epoch - extra) // sequence_length
    without_last = ((epochs - 1) * per_epoch - extra) // sequence_length
    separate = False
    if epochs > 1 and num_samples is not None:
        of_one_epoch = (per_epoch - extra) // sequence_length
        separate = num_samples - without_last < int(_SEPARATE_BELOW * of_one_epoch)
    # Megatron draws from one legacy generator, the documents first; its bits are part of the order.
    rng = np.random.RandomState(seed)
    sequences = np.arange(first, first + len(lengths), dtype=np.int32)
    documents = _shuffled(sequences, epochs - 1 if separate else epochs, rng)
    if separate:
        documents = np.concatenate((documents, _shuffled(sequences, 1, rng)))
    samples = _sample_index(lengths[documents - first], total, sequence_length=sequence_length, extra_token=extra_token)
    dtype = np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64
    shuffle = np.arange(total, dtype=dtype)
    if separate:
        rng.shuffle(shuffle[:without_last])
        rng.shuffle(shuffle[without_last:])
    else:
        rng.shuffle(shuffle)
    return MegatronIndices(documents=documents, samples=samples, shuffle=shuffle)


def _shuffled(sequences: np.ndarray, epochs: int, rng: np.random.RandomState) -> np.ndarray:
    tiled = np.tile(sequences, epochs)
    rng.shuffle(tiled)
    return tiled


def _sample_index(lengths: np.ndarray, total: int, *, sequence_length: int, extra_token: bool) -> np.ndarray:
    """Return where each sample begins in sequences of these lengths, [total + 1, 2]."""
    ends = np.cumsum(lengths, dtype=np.int64)
    places = np.arange(total + 1, dtype=np.int64) * sequence_length
    # With the extra token a border belongs to the sequence that goes on behind it, without to the one that ends there.
    rows = np.searchsorted(ends, places, side="right" if extra_token else "left")
    rows[0] = 0
    offsets = places - (ends[rows] - lengths[rows])
    offsets[0] = 0
    largest = max(int(rows.max()), int(offsets.max()))
    dtype = np.int32 if largest <= np.iinfo(np.int32).max else np.int64
    return np.stack((rows, offsets), axis=1).astype(dtype)


def samples_of_source(num_samples: int, weight: float) -> int:
    """Return how many samples Megatron asks a source of a blend for; ``weight`` is its share of 1."""
    return math.ceil(math.ceil(num_samples * weight) * (1 + _SURPLUS))


def blend_index(weights: Sequence[float], num_samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Return Megatron's blend: the source of each sample and its index in that source.

    Args:
        weights: Share of each source; they need not sum to 1.
        num_samples: N.

    Returns:
        [N] int16 and [N] int64.
    """
    total = sum(weights)
    shares = [weight / total for weight in weights]
    counts = [0] * len(shares)
    sources = np.zeros(num_samples, dtype=np.int16)
    indices = np.zeros(num_samples, dtype=np.int64)
    # One sample depends on the one before, to the last bit of a float. Plain lists: several times faster than NumPy.
    everyone = range(len(shares))
    for position in range(num_samples):
        scale = float(max(position, 1))
        chosen, largest = 0, shares[0] * scale - counts[0]
        for source in everyone:
            behind = shares[source] * scale - counts[source]
            if behind > largest:
                chosen, largest = source, behind
        sources[position] = chosen
        indices[position] = counts[chosen]
        counts[chosen] += 1
    return sources, indices
