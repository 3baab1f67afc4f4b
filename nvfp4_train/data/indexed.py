"""Read Megatron ``.bin/.idx`` pairs: token ids back to back, and where sequences and documents begin.

``.idx``, little endian, without padding: magic (9 bytes), version (uint64), dtype code (uint8), number of sequences NS
(uint64), number of documents plus one ND (uint64), lengths (int32 [NS], tokens), pointers (int64 [NS], bytes into the
``.bin``), document starts (int64 [ND], indices of sequences; a repeated value is an empty document) and, in multimodal
files only, modes (int8 [NS]).
"""

import struct
from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np

from nvfp4_train.data.error import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPE_OF_CODE: dict[int, np.dtype] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
CODE_OF_DTYPE = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}
_REBUILD = "copy the pair again from where it was made, or delete its folder and prepare it again"
_CHUNK = 1 << 15  # entries that are checked together: they and what is computed from them stay in the core's cache


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the dtype that Megatron's tools choose: uint16 below 65500 entries, int32 from there on."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


class IndexedTokens:
    """A memory-mapped ``.bin/.idx`` pair, checked completely when it is opened.

    Opening reads the index once, in pieces, and keeps no array of its own: lengths, boundaries, modes and tokens are
    read-only views of the files, shared by all processes of a machine. Views of the index are not aligned, because the
    format is not; NumPy copies them where that matters.

    Args:
        prefix: Path without ``.bin`` or ``.idx``.

    Raises:
        DataError: A file is missing, empty, truncated or malformed, or the two do not fit each other.

    Attributes:
        dtype: dtype of a token.
        lengths: [NS] int32, tokens of each sequence.
        document_indices: [ND] int64, first sequence of each document, and the end.
        modes: [NS] int8, or None where the file has none.
        tokens: [num_tokens], the whole stream.
        num_tokens: Tokens in the pair.
        single_sequence: Whether every document is one sequence.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        self.index_path = prefix.with_name(prefix.name + ".idx")
        self.data_path = prefix.with_name(prefix.name + ".bin")
        raw = _map_index(self.index_path)
        self.dtype, num_sequences, num_boundaries = self._read_header(raw)
        self._slice_arrays(raw, num_sequences, num_boundaries)
        self.num_tokens = self._check_sequences()
        self.single_sequence = self._check_boundaries()
        self.tokens = self._map_tokens()

    @property
    def num_sequences(self) -> int:
        """Sequences in the pair."""
        return len(self.lengths)

    @property
    def num_documents(self) -> int:
        """Documents in the pair, empty ones included."""
        return len(self.document_indices) - 1

    @cached_property
    def sequence_starts(self) -> np.ndarray:
        """[NS + 1] int64: the first token of each sequence in the stream, and the end; made on first use and kept."""
        starts = np.empty(self.num_sequences + 1, dtype=np.int64)
        np.floor_divide(self._pointers, self.dtype.itemsize, out=starts[:-1])
        starts[-1] = self.num_tokens
        return starts

    def document_starts(self) -> np.ndarray:
        """Return [num_documents + 1] int64: the first token of each document in the stream, and the end."""
        return self.sequence_starts if self.single_sequence else self.sequence_starts[self.document_indices]

    def document_starts_between(self, first: int, last: int) -> np.ndarray:
        """Return [last - first] int64: the first token of documents ``first`` to ``last - 1``, from the file.

        ``num_documents`` counts as a document that starts at the end, so ``last`` may be ``num_documents + 1``.
        """
        sequences = self.document_indices[first:last]
        starts = np.full(len(sequences), self.num_tokens, dtype=np.int64)
        inside = sequences < self.num_sequences
        starts[inside] = self._pointers[sequences[inside]] // self.dtype.itemsize
        return starts

    def sequence(self, index: int) -> np.ndarray:
        """Return the tokens of sequence ``index`` (a view of the file)."""
        start = int(self._pointers[index]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.lengths[index])]

    def document(self, index: int) -> np.ndarray:
        """Return the tokens of document ``index``, all its sequences (a view of the file)."""
        if self.single_sequence:
            return self.sequence(index)
        first, last = self.document_starts_between(index, index + 2).tolist()
        return self.tokens[first:last]

    def documents(self, first: int = 0) -> Iterator[np.ndarray]:
        """Yield the tokens of document ``first`` and all after it (views of the file): the fast way through a pair."""
        for block in range(first, self.num_documents, _CHUNK):
            # Slicing with Python's own integers is several times faster than with NumPy's.
            starts = self.document_starts_between(block, min(block + _CHUNK, self.num_documents) + 1).tolist()
            for start, end in pairwise(starts):
                yield self.tokens[start:end]

    def read(self, start: int, count: int) -> np.ndarray:
        """Return tokens ``start`` to ``start + count - 1`` of the stream (a view of the file)."""
        return self.tokens[start : start + count]

    def _read_header(self, raw: np.ndarray) -> tuple[np.dtype, int, int]:
        if raw.size < HEADER.size:
            raise self._index_error(f"{raw.size} bytes", f"a header of {HEADER.size} bytes")
        magic, version, code, num_sequences, num_boundaries = HEADER.unpack(raw[: HEADER.size].tobytes())
        if magic != MAGIC:
            raise self._index_error(f"magic {magic!r}", f"magic {MAGIC!r}: the index of a Megatron .bin/.idx pair")
        if version != VERSION:
            raise self._index_error(f"version {version}", f"version {VERSION}")
        if code not in DTYPE_OF_CODE:
            raise self._index_error(f"dtype code {code}", f"one of {sorted(DTYPE_OF_CODE)}")
        if num_boundaries < 1:
            raise self._index_error("no document boundary", "at least one boundary")
        return DTYPE_OF_CODE[code], num_sequences, num_boundaries

    def _slice_arrays(self, raw: np.ndarray, num_sequences: int, num_boundaries: int) -> None:
        lengths_at = HEADER.size
        pointers_at = lengths_at + 4 * num_sequences
        documents_at = pointers_at + 8 * num_sequences
        modes_at = documents_at + 8 * num_boundaries
        if raw.size not in (modes_at, modes_at + num_sequences):
            raise self._index_error(
                f"{raw.size} bytes",
                f"{modes_at} bytes ({modes_at + num_sequences} with modes) for {num_sequences} sequences and "
                f"{num_boundaries - 1} documents",
            )
        self.lengths = raw[lengths_at:pointers_at].view("<i4")
        self._pointers = raw[pointers_at:documents_at].view("<i8")
        self.document_indices = raw[documents_at:modes_at].view("<i8")
        self.modes = raw[modes_at:].view("i1") if raw.size > modes_at else None

    def _check_sequences(self) -> int:
        """Check lengths and pointers; return the number of tokens."""
        end = 0  # bytes
        for first in range(0, len(self.lengths), _CHUNK):
            lengths = self.lengths[first : first + _CHUNK].astype(np.int64)
            if lengths.min() < 0:
                where = int(np.argmax(lengths < 0))
                raise self._index_error(f"length {lengths[where]} of sequence {first + where}", "lengths of 0 or more")
            lengths *= self.dtype.itemsize
            expected = np.cumsum(lengths)
            total = int(expected[-1])
            expected -= lengths
            expected += end
            pointers = self._pointers[first : first + _CHUNK]
            if not np.array_equal(pointers, expected):
                where = int(np.argmax(pointers != expected))
                raise self._index_error(
                    f"pointer {pointers[where]} of sequence {first + where}",
                    f"{expected[where]}: sequences back to back",
                )
            end += total
        return end // self.dtype.itemsize

    def _check_boundaries(self) -> bool:
        """Check where documents begin; return whether every document is one sequence."""
        boundaries = self.document_indices
        rising, single = True, len(boundaries) == len(self.lengths) + 1
        for first in range(0, len(boundaries) - 1, _CHUNK):
            piece = boundaries[first : first + _CHUNK + 1]
            steps = np.diff(piece)
            rising = rising and steps.min() >= 0
            single = single and piece[0] == first and steps.max() == 1 and steps.min() == 1
        if boundaries[0] != 0 or boundaries[-1] != len(self.lengths) or not rising:
            raise self._index_error(
                f"document boundaries from {boundaries[0]} to {boundaries[-1]}" + ("" if rising else ", not rising"),
                f"boundaries that rise from 0 to {len(self.lengths)}, the number of sequences",
            )
        return bool(single)

    def _map_tokens(self) -> np.ndarray:
        if not self.data_path.is_file():
            raise DataError(self.data_path, found="no file", expected=f"the tokens of {self.index_path}", fix=_REBUILD)
        size = self.data_path.stat().st_size
        expected = self.num_tokens * self.dtype.itemsize
        if size != expected:
            what = "a truncated file" if size < expected else "a file that is too long"
            raise DataError(
                self.data_path,
                found=f"{size} bytes: {what}, or the .bin of another .idx",
                expected=f"{expected} bytes: {self.num_tokens} tokens of {self.dtype.name}, as {self.index_path} says",
                fix=_REBUILD,
            )
        if expected == 0:
            return np.empty(0, dtype=self.dtype)
        # A plain array: slicing a memmap object costs several times as much.
        return np.memmap(self.data_path, dtype=self.dtype, mode="r").view(np.ndarray)

    def _index_error(self, found: str, expected: str) -> DataError:
        return DataError(self.index_path, found=found, expected=expected, fix=_REBUILD)


def _map_index(path: Path) -> np.ndarray:
    if not path.is_file():
        raise DataError(
            path,
            found="no file",
            expected="the .idx of a Megatron .bin/.idx pair",
            fix="check the path, without its ending",
        )
    if path.stat().st_size == 0:
        raise DataError(path, found="an empty file", expected=f"a header of {HEADER.size} bytes", fix=_REBUILD)
    return np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
