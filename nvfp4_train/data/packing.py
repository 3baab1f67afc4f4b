"""Cut a stream of documents into sequences of one length: concatenate and cut."""

from dataclasses import dataclass

import numpy as np
import torch

from nvfp4_train.data.batch import IGNORE_INDEX, Batch
from nvfp4_train.data.error import DataError
from nvfp4_train.data.indexed import IndexedTokens


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """Some sequences, ready to become a batch.

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


class PackedTokens:
    """Documents end to end in file order; sample k is tokens ``k * S`` to ``k * S + S`` of them.

    Neighbouring samples overlap by one token: the last label of one is the first input of the next, so each token but
    the first is a label once. The label of a document's last token would be the first token of an unrelated document:
    it is not counted.

    Args:
        source: Tokens and where documents begin.
        sequence_length: S.
        vocab_size: Entries of the model's vocabulary.

    Raises:
        DataError: There are too few tokens for one sequence, or the file does not hold integers.
    """

    def __init__(self, source: IndexedTokens, *, sequence_length: int, vocab_size: int) -> None:
        if source.dtype.kind not in "iu":
            raise DataError(
                source.data_path, found=f"{source.dtype.name} values", expected="integer token ids",
                fix="use a pair that holds text",
            )  # fmt: skip
        self.num_samples = (source.num_tokens - 1) // sequence_length
        if self.num_samples < 1:
            raise DataError(
                source.data_path,
                found=f"{source.num_tokens} tokens",
                expected=f"at least {sequence_length + 1}, for one sequence and its last label",
                fix="use more text, a shorter batch.sequence_length, or another data.validation_fraction",
            )
        self._source = source
        self._length = sequence_length
        self._vocab_size = vocab_size
        self._document_starts = source.document_starts()[:-1]

    def read(self, samples: np.ndarray) -> PackedRows:
        """Return the rows of some samples.

        Args:
            samples: [B] int64, indices in ``[0, num_samples)``.

        Raises:
            DataError: A token id is outside the vocabulary.
        """
        window = np.empty((len(samples), self._length + 1), dtype=np.int64)
        starts_document = np.zeros(window.shape, dtype=bool)
        for row, sample in enumerate(samples.tolist()):
            first = sample * self._length
            last = first + self._length + 1
            window[row] = self._source.tokens[first:last]
            low, high = np.searchsorted(self._document_starts, (first, last))
            starts_document[row, self._document_starts[low:high] - first] = True
        self._check_range(window, samples)
        return _rows(window, starts_document)

    def _check_range(self, window: np.ndarray, samples: np.ndarray) -> None:
        outside = (window < 0) | (window >= self._vocab_size)
        if not outside.any():
            return
        row, column = (int(index) for index in np.argwhere(outside)[0])
        raise DataError(
            self._source.data_path,
            found=f"token id {window[row, column]} at token {int(samples[row]) * self._length + column}",
            expected=f"ids from 0 to {self._vocab_size - 1} (model.vocab_size {self._vocab_size})",
            fix="use the tokenizer that the data was made with, or prepare the data again",
        )


def _rows(window: np.ndarray, starts_document: np.ndarray) -> PackedRows:
    labels = np.where(starts_document[:, 1:], IGNORE_INDEX, window[:, 1:])
    starts = starts_document[:, :-1]
    starts[:, 0] = False  # whatever the row begins with is its document 0
    columns = np.arange(starts.shape[1], dtype=np.int64)
    last_start = np.maximum.accumulate(np.where(starts, columns, 0), axis=1)
    return PackedRows(
        tokens=np.ascontiguousarray(window[:, :-1]),
        labels=labels,
        document_ids=np.cumsum(starts, axis=1, dtype=np.int32),
        position_ids=columns - last_start,
    )
