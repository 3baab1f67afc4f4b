"""Pack documents into rows so that one that fits in a row is not cut."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import IO

import numpy as np

from nvfp4_train.data.batch import IGNORE_INDEX
from nvfp4_train.data.cache import cached_folder
from nvfp4_train.data.error import DataError
from nvfp4_train.data.packing import check_vocabulary
from nvfp4_train.data.source import TokenStream

# Documents that are packed together: neighbours in the file, so that memory is bounded and reading stays local.
WINDOW = 1 << 16
_VERSION = 1  # Part of the cache key: raise it when the same documents are packed in another way.
_FILES = {"rows": "<i8", "starts": "<i8", "lengths": "<i4"}


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """Parts of documents in the order of the rows that hold them.

    Args:
        starts: [P] int64, token of the stream at which a piece begins.
        lengths: [P] int64, columns that it takes.
        row_sizes: [R] int64, pieces in each row.
    """

    starts: np.ndarray
    lengths: np.ndarray
    row_sizes: np.ndarray


class BestFitTokens:
    """Rows of whole documents; what is left of a row is padding.

    A document of n tokens takes ``n - 1`` columns: its last token is a label only, because nothing is predicted from
    it. So each token but the first of a document is a label once, as with concatenation. A document of more than
    ``S + 1`` tokens is cut every S columns and its rest is packed like any other piece.

    The rows are found once, by best-fit decreasing within windows of neighbouring documents, and kept in the cache
    folder; they do not depend on epochs or ranks.

    Args:
        source: Tokens and where documents begin.
        sequence_length: S.
        vocab_size: Entries of the model's vocabulary.
        pad_token: What padding holds.
        table: The folder that ``build_best_fit`` made.

    Raises:
        DataError: No document has a label.
    """

    def __init__(
        self, source: TokenStream, *, sequence_length: int, vocab_size: int, pad_token: int, table: Path
    ) -> None:
        arrays = {name: _load(table / f"{name}.bin", dtype) for name, dtype in _FILES.items()}
        self._rows, self._starts, self._lengths = arrays["rows"], arrays["starts"], arrays["lengths"]
        self.num_samples = len(self._rows) - 1
        self.sequence_length = sequence_length
        if self.num_samples < 1:
            raise DataError(
                source.place(0)[0], found="no document of two tokens or more", expected="a label to learn",
                fix="use more text",
            )  # fmt: skip
        self._source = source
        self._vocab_size = vocab_size
        self._pad_token = pad_token

    def fill(self, sample: int, *, tokens: np.ndarray, labels: np.ndarray) -> list[int]:
        """Write a row and return where documents begin in it; see ``Samples``."""
        first, last = self._rows[sample : sample + 2].tolist()
        lengths = self._lengths[first:last].tolist()
        column = 0
        for start, length in zip(self._starts[first:last].tolist(), lengths, strict=True):
            window = self._source.read(start, start + length + 1)
            check_vocabulary(window, source=self._source, first=start, vocab_size=self._vocab_size)
            tokens[column : column + length] = window[:-1]
            labels[column : column + length] = window[1:]
            column += length
        tokens[column:] = self._pad_token
        labels[column:] = IGNORE_INDEX
        return list(accumulate(lengths))  # the last one is where the padding begins, a document of its own


def build_best_fit(source: TokenStream, *, sequence_length: int, fingerprint: str, cache_dir: Path) -> Path:
    """Return the folder with the rows of a source, which is made if it is missing.

    Args:
        source: The documents.
        sequence_length: S.
        fingerprint: Hash of the documents.
        cache_dir: Folder of all prepared files.
    """
    parts = [_VERSION, WINDOW, fingerprint, sequence_length]
    key = "best_fit_" + hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

    def make(folder: Path) -> None:
        files = {name: (folder / f"{name}.bin").open("wb") for name in _FILES}
        try:
            _write_windows(source, sequence_length, files)
        finally:
            for file in files.values():
                file.close()

    return cached_folder(cache_dir, key=key, make=make)


def _write_windows(source: TokenStream, sequence_length: int, files: Mapping[str, IO[bytes]]) -> None:
    num_pieces = 0
    files["rows"].write(np.zeros(1, dtype="<i8").tobytes())
    for starts, ends in _windows(source):
        pieces = pack_window(starts, ends, capacity=sequence_length)
        files["rows"].write((num_pieces + np.cumsum(pieces.row_sizes)).astype("<i8").tobytes())
        files["starts"].write(pieces.starts.astype("<i8").tobytes())
        files["lengths"].write(pieces.lengths.astype("<i4").tobytes())
        num_pieces += len(pieces.starts)


def _windows(source: TokenStream) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for first in range(0, source.num_documents, WINDOW):
        borders = source.document_starts(first, min(first + WINDOW, source.num_documents) + 1)
        yield borders[:-1], borders[1:]


def pack_window(starts: np.ndarray, ends: np.ndarray, *, capacity: int) -> Pieces:
    """Pack documents into rows by best-fit decreasing: the largest first, each into the fullest row that has room.

    Pieces of one length are placed together, as many into a row as fit, which makes the work proportional to the number
    of different lengths.

    Args:
        starts: [D] int64, first token of each document.
        ends: [D] int64, token after its last.
        capacity: Columns of a row.
    """
    piece_starts, piece_lengths = _cut(starts, ends, capacity=capacity)
    order = np.argsort(-piece_lengths, kind="stable")
    piece_starts, piece_lengths = piece_starts[order], piece_lengths[order]
    lengths, firsts = np.unique(-piece_lengths, return_index=True)
    lasts = np.append(firsts, len(piece_lengths))[1:]
    rows = np.empty(len(piece_lengths), dtype=np.int64)
    room = _Room(capacity)
    for length, first, last in zip((-lengths).tolist(), firsts.tolist(), lasts.tolist(), strict=True):
        while first < last:
            free, chosen = room.take(length, wanted=last - first)
            each = free // length
            placed = min(each * len(chosen), last - first)
            rows[first : first + placed] = np.repeat(chosen, each)[:placed]
            full, rest = divmod(placed, each)
            room.put(chosen[:full], free - each * length)
            room.put(chosen[full:], free - rest * length)
            first += placed
    by_row = np.argsort(rows, kind="stable")
    return Pieces(
        starts=piece_starts[by_row],
        lengths=piece_lengths[by_row],
        row_sizes=np.bincount(rows, minlength=room.num_rows),
    )


def _cut(starts: np.ndarray, ends: np.ndarray, *, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Return starts and lengths, in columns, of the pieces of documents; documents without a label have none."""
    columns = np.maximum(ends - starts - 1, 0)
    numbers = -(-columns // capacity)
    document = np.repeat(np.arange(len(starts)), numbers)
    offsets = (np.arange(len(document)) - np.repeat(np.cumsum(numbers) - numbers, numbers)) * capacity
    return starts[document] + offsets, np.minimum(columns[document] - offsets, capacity)


class _Room:
    """Rows by the columns that are free in them."""

    def __init__(self, capacity: int) -> None:
        self.num_rows = 0
        self._capacity = capacity
        self._rows: dict[int, list[int]] = {}
        self._sizes = 0  # bit n says whether there is a row with n free columns

    def take(self, length: int, *, wanted: int) -> tuple[int, list[int]]:
        """Return how much is free in the fullest rows that have room for ``length``, and enough of these rows.

        New rows where no row has room. The rows are taken out.
        """
        fitting = self._sizes >> length
        if not fitting:
            number = -(-wanted // (self._capacity // length))
            self.num_rows += number
            return self._capacity, list(range(self.num_rows - number, self.num_rows))
        free = length + (fitting & -fitting).bit_length() - 1
        rows = self._rows[free]
        number = min(len(rows), -(-wanted // (free // length)))
        taken = rows[len(rows) - number :]
        del rows[len(rows) - number :]
        if not rows:
            self._sizes &= ~(1 << free)
        return free, taken

    def put(self, rows: list[int], free: int) -> None:
        """Put rows back with what is free in them now."""
        if rows and free:
            self._rows.setdefault(free, []).extend(rows)
            self._sizes |= 1 << free


def _load(path: Path, dtype: str) -> np.ndarray:
    if path.stat().st_size == 0:
        return np.empty(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r").view(np.ndarray)
