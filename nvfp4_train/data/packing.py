"""Cut a stream of documents into sequences of one length: concatenate and cut."""

import numpy as np

from nvfp4_train.data.batch import IGNORE_INDEX
from nvfp4_train.data.error import DataError
from nvfp4_train.data.source import TokenStream


class PackedTokens:
    """Documents end to end in file order; sample k is tokens ``k * S`` to ``k * S + S`` of them.

    Neighbouring samples overlap by one token: the last label of one is the first input of the next, so each token but
    the first is a label once. The label of a document's last token would be the first token of an unrelated document:
    it is not counted, unless the user wants that.

    Args:
        source: Tokens and where documents begin.
        sequence_length: S.
        vocab_size: Entries of the model's vocabulary.
        count_document_ends: Whether the label of a document's last token counts.

    Raises:
        DataError: There are too few tokens for one sequence.
    """

    def __init__(
        self, source: TokenStream, *, sequence_length: int, vocab_size: int, count_document_ends: bool = False
    ) -> None:
        self.num_samples = (source.num_tokens - 1) // sequence_length
        self.sequence_length = sequence_length
        if self.num_samples < 1:
            raise DataError(
                source.place(0)[0],
                found=f"{source.num_tokens} tokens",
                expected=f"at least {sequence_length + 1}, for one sequence and its last label",
                fix="use more text, a shorter batch.sequence_length, or another data.validation_fraction",
            )
        self._source = source
        self._vocab_size = vocab_size
        self._counts_ends = count_document_ends

    def fill(self, sample: int, *, tokens: np.ndarray, labels: np.ndarray) -> list[int]:
        """Write a row and return where documents begin in it; see ``Samples``."""
        first = sample * self.sequence_length
        last = first + self.sequence_length + 1
        window = self._source.read(first, last)
        check_vocabulary(window, source=self._source, first=first, vocab_size=self._vocab_size)
        tokens[:] = window[:-1]
        labels[:] = window[1:]
        starts = [start - first for start in self._source.starts_within(first, last)]
        if not self._counts_ends:
            for start in starts:
                labels[start - 1] = IGNORE_INDEX
        return starts


def check_vocabulary(window: np.ndarray, *, source: TokenStream, first: int, vocab_size: int) -> None:
    """Check that tokens are ids of the model.

    Args:
        window: [N] integers.
        source: Where they come from, for the message.
        first: Place of the first of them in ``source``.
        vocab_size: Entries of the model's vocabulary.

    Raises:
        DataError: A token id is outside the vocabulary.
    """
    # As unsigned, a negative id is a very large one: one pass sees both ends.
    unsigned = window.view(f"u{window.itemsize}") if window.dtype.kind == "i" else window
    if not len(window) or np.maximum.reduce(unsigned) < vocab_size:
        return
    place = int(np.argmax(unsigned >= vocab_size))
    path, index = source.place(first + place)
    raise DataError(
        path,
        found=f"token id {window[place]} at token {index}",
        expected=f"ids from 0 to {vocab_size - 1} (model.vocab_size {vocab_size})",
        fix="use the tokenizer that the data was made with, or prepare the data again",
    )
