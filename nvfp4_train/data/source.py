"""Token files as one stream of tokens with document borders, without anything in memory that grows with them."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from nvfp4_train.data.error import DataError
from nvfp4_train.data.indexed import HEADER, IndexedTokens


class TokenStream(Protocol):
    """Tokens of documents end to end.

    Attributes:
        num_tokens: Length of the stream.
        num_documents: Documents in it, empty ones included.
    """

    num_tokens: int
    num_documents: int

    def read(self, first: int, last: int) -> np.ndarray:
        """Return tokens ``first`` to ``last - 1``, [last - first] integers of any dtype."""
        ...

    def starts_within(self, first: int, last: int) -> list[int]:
        """Return where documents begin after token ``first`` and before ``last``, ascending.

        An empty document repeats the border of the one that follows.
        """
        ...

    def document_starts(self, first: int, last: int) -> np.ndarray:
        """Return [last - first] int64: the first token of documents ``first`` to ``last - 1``.

        ``num_documents`` counts as a document at the end of the stream.
        """
        ...

    def place(self, token: int) -> tuple[Path, int]:
        """Return the file that holds a token and its index there, for messages."""
        ...


class SourceTokens:
    """The pairs of a source, read one after the other.

    Args:
        pairs: At least one, all of integers.

    Raises:
        DataError: A file does not hold integers, or there is no token at all.
    """

    def __init__(self, pairs: Sequence[IndexedTokens]) -> None:
        for pair in pairs:
            if pair.dtype.kind not in "iu":
                raise DataError(
                    pair.data_path, found=f"{pair.dtype.name} values", expected="integer token ids",
                    fix="use a pair that holds text",
                )  # fmt: skip
        self.pairs = [_Pair(pair) for pair in pairs]
        self._token_starts = _starts([pair.num_tokens for pair in pairs])
        self._document_starts = _starts([pair.num_documents for pair in pairs])
        self.num_tokens = self._token_starts[-1]
        self.num_documents = self._document_starts[-1]
        if self.num_tokens == 0:
            raise DataError(
                pairs[0].data_path, found=f"no token in {len(pairs)} file(s): an empty source",
                expected="at least one token", fix="prepare the data again, or take the source out of data.sources",
            )  # fmt: skip

    def read(self, first: int, last: int) -> np.ndarray:
        """Return tokens ``first`` to ``last - 1``; a view where one file holds them all."""
        parts = [pair.tokens[low:high] for pair, low, high, _ in self._pieces(first, last)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts or [np.empty(0, dtype=np.int64)])

    def starts_within(self, first: int, last: int) -> list[int]:
        """Return where documents begin after token ``first`` and before ``last``."""
        starts: list[int] = []
        index = bisect_right(self._token_starts, first) - 1
        while index < len(self.pairs) and self._token_starts[index] < last:
            offset, pair = self._token_starts[index], self.pairs[index]
            # A later file begins with a document; empty documents at the end of a file begin where the next one does.
            after, before = max(first - offset, -1), min(last - offset, pair.num_tokens + 1)
            starts += [offset + start for start in pair.starts_within(after, before)]
            index += 1
        return starts

    def document_starts(self, first: int, last: int) -> np.ndarray:
        """Return [last - first] int64: the first token of documents ``first`` to ``last - 1``."""
        parts = []
        for index, pair in enumerate(self.pairs):
            offset = self._document_starts[index]
            low, high = max(first - offset, 0), min(last - offset, pair.num_documents)
            if low < high:
                parts.append(pair.document_starts(low, high) + self._token_starts[index])
        if last > self.num_documents:
            parts.append(np.asarray([self.num_tokens]))
        return np.concatenate(parts or [np.empty(0, dtype=np.int64)])

    def place(self, token: int) -> tuple[Path, int]:
        """Return the file that holds a token and its index there."""
        index = bisect_right(self._token_starts, token) - 1
        return self.pairs[index].path, token - self._token_starts[index]

    def _pieces(self, first: int, last: int) -> "list[tuple[_Pair, int, int, int]]":
        """Return the files that hold a range: each with its own range, and the stream's token at its beginning."""
        index = bisect_right(self._token_starts, first) - 1
        if last <= self._token_starts[index + 1]:
            offset = self._token_starts[index]
            return [(self.pairs[index], first - offset, last - offset, offset)]
        pieces = []
        while index < len(self.pairs) and self._token_starts[index] < last:
            offset = self._token_starts[index]
            low, high = max(first - offset, 0), min(last - offset, self.pairs[index].num_tokens)
            if low < high:
                pieces.append((self.pairs[index], low, high, offset))
            index += 1
        return pieces


class _Pair:
    """One file: finds the documents of a range by bisection in the index, which stays on disk.

    The arrays of an index are not aligned; a cast memoryview reads single entries of them without a copy, several times
    faster than NumPy does.
    """

    def __init__(self, pair: IndexedTokens) -> None:
        self.path = pair.data_path
        self.tokens = pair.tokens
        self.num_tokens = pair.num_tokens
        self.num_documents = pair.num_documents
        self._pair = pair
        self._itemsize = pair.dtype.itemsize
        raw = np.memmap(pair.index_path, dtype=np.uint8, mode="r").view(np.ndarray)
        pointers_at = HEADER.size + 4 * pair.num_sequences
        documents_at = pointers_at + 8 * pair.num_sequences
        self._pointers = raw[pointers_at:documents_at].data.cast("q")
        self._documents = raw[documents_at : documents_at + 8 * (pair.num_documents + 1)].data.cast("q")

    def starts_within(self, first: int, last: int) -> list[int]:
        """Return where documents begin after token ``first`` and before ``last``."""
        low = bisect_right(self._pointers, first * self._itemsize)
        high = bisect_left(self._pointers, last * self._itemsize, lo=low)
        if not self._pair.single_sequence:
            low = bisect_left(self._documents, low)
            is_whole = last > self.num_tokens  # with the documents at the end that have no sequence
            high = self.num_documents if is_whole else bisect_left(self._documents, high, lo=low)
            return self.document_starts(low, high).tolist()
        return [pointer // self._itemsize for pointer in self._pointers[low:high]]

    def document_starts(self, first: int, last: int) -> np.ndarray:
        """Return the first token of documents ``first`` to ``last - 1``."""
        return self._pair.document_starts_between(first, last)


def _starts(lengths: Sequence[int]) -> list[int]:
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return starts
