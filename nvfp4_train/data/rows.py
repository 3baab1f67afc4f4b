"""Rows of one length, ready to become a batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch

from nvfp4_train.data.batch import Batch


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """Some sequences.

    Args:
        tokens: [B, S] int64.
        labels: [B, S] int64, ``IGNORE_INDEX`` where not counted.
        document_ids: [B, S] int32, counted from 0 in each row.
        position_ids: [B, S] int64.
    """

    tokens: np.ndarray
    labels: np.ndarray
    document_ids: np.ndarray
    position_ids: np.ndarray

    def batch(self, *, microbatch_index: int) -> Batch:
        """Return the rows as a batch; the tensors share the arrays' memory."""
        return Batch(
            tokens=torch.from_numpy(self.tokens),
            labels=torch.from_numpy(self.labels),
            document_ids=torch.from_numpy(self.document_ids),
            position_ids=torch.from_numpy(self.position_ids),
            microbatch_index=microbatch_index,
        )


class Samples(Protocol):
    """Documents packed into rows of one length S.

    Attributes:
        num_samples: Rows of one epoch.
        sequence_length: S.
    """

    num_samples: int
    sequence_length: int

    def fill(self, sample: int, *, tokens: np.ndarray, labels: np.ndarray) -> list[int]:
        """Write row ``sample`` into ``tokens`` [S] and ``labels`` [S].

        Returns:
            Ascending columns, above 0, at which another document begins; repeated for an empty document, and S where
            one begins behind the row.

        Raises:
            DataError: A token id is outside the vocabulary.
        """
        ...


def finish_rows(tokens: np.ndarray, labels: np.ndarray, starts: Sequence[Sequence[int]]) -> PackedRows:
    """Number the documents of filled rows and their positions.

    Args:
        tokens: [B, S] int64.
        labels: [B, S] int64.
        starts: For each row what ``Samples.fill`` returned.
    """
    num_rows, length = tokens.shape
    # Documents are few beside tokens: lists of them cost less than the calls that NumPy would need.
    firsts: list[int] = []
    numbers: list[int] = []
    for row, columns in enumerate(starts):
        number, last = 0, 0
        firsts.append(row * length)
        numbers.append(0)
        for column in columns:
            if last < column < length:
                number, last = number + 1, column
                firsts.append(row * length + column)
                numbers.append(number)
    first = np.array(firsts)
    sizes = np.empty_like(first)
    np.subtract(first[1:], first[:-1], out=sizes[:-1])
    sizes[-1] = num_rows * length - first[-1]
    positions = np.repeat(first, sizes)
    np.subtract(_counter(num_rows * length), positions, out=positions)
    document_ids = np.repeat(np.array(numbers, dtype=np.int32), sizes)
    return PackedRows(
        tokens=tokens,
        labels=labels,
        document_ids=document_ids.reshape(tokens.shape),
        position_ids=positions.reshape(tokens.shape),
    )


@lru_cache(maxsize=8)
def _counter(size: int) -> np.ndarray:
    return np.arange(size)


def read_rows(samples: Samples, indices: np.ndarray) -> PackedRows:
    """Return the rows ``indices`` [B] of one source."""
    shape = (len(indices), samples.sequence_length)
    tokens, labels = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int64)
    starts = [
        samples.fill(sample, tokens=tokens[row], labels=labels[row]) for row, sample in enumerate(indices.tolist())
    ]
    return finish_rows(tokens, labels, starts)
