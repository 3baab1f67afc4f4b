"""Read Megatron ``.bin/.idx`` pairs: token ids back to back, and where sequences and documents begin.

``.idx``, little endian, without padding: magic (9 bytes), version (uint64), dtype code (uint8), number of sequences NS
(uint64), number of documents plus one ND (uint64), lengths (int32 [NS], tokens), pointers (int64 [NS], bytes into the
``.bin``), document starts (int64 [ND], indices of sequences; a repeated value is an empty document) and, in multimodal
files only, modes (int8 [NS]).
"""

import struct
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


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the dtype that Megatron's tools choose: uint16 below 65500 entries, int32 from there on."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


class IndexedTokens:
    """A memory-mapped ``.bin/.idx`` pair, checked completely when it is opened.

    Args:
        prefix: Path without ``.bin`` or ``.idx``.

    Raises:
        DataError: A file is missing, empty, truncated or malformed, or the two do not fit each other.

    Attributes:
        dtype: dtype of a token.
        lengths: [NS] int32, tokens of each sequence.
        sequence_starts: [NS + 1] int64, first token of each sequence in the stream, and the end.
        document_indices: [ND] int64, first sequence of each document, and the end.
        modes: [NS] int8, or None where the file has none.
        tokens: [num_tokens], the whole stream.
    """

    def __init__(self, prefix: Path) -> None:
        self.index_path = prefix.with_name(prefix.name + ".idx")
        self.data_path = prefix.with_name(prefix.name + ".bin")
        raw = _map_index(self.index_path)
        self.dtype, num_sequences, num_boundaries = self._read_header(raw)
        self._slice_arrays(raw, num_sequences, num_boundaries)
        self._check_arrays()
        self.tokens = self._map_tokens()

    @property
    def num_tokens(self) -> int:
        """Tokens in the pair."""
        return int(self.sequence_starts[-1])

    @property
    def num_sequences(self) -> int:
        """Sequences in the pair."""
        return len(self.lengths)

    @property
    def num_documents(self) -> int:
        """Documents in the pair, empty ones included."""
        return len(self.document_indices) - 1

    def document_starts(self) -> np.ndarray:
        """Return [num_documents + 1] int64: the first token of each document in the stream, and the end."""
        return self.sequence_starts[self.document_indices]

    def sequence(self, index: int) -> np.ndarray:
        """Return the tokens of sequence ``index`` (a view of the file)."""
        return self.tokens[self.sequence_starts[index] : self.sequence_starts[index + 1]]

    def document(self, index: int) -> np.ndarray:
        """Return the tokens of document ``index``, all its sequences (a view of the file)."""
        first, last = self.document_indices[index], self.document_indices[index + 1]
        return self.tokens[self.sequence_starts[first] : self.sequence_starts[last]]

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
        # The arrays are not aligned in the file; the copies are, which searchsorted and cumsum want.
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
        self.lengths = raw[lengths_at:pointers_at].view("<i4").copy()
        self._pointers = raw[pointers_at:documents_at].view("<i8")
        self.document_indices = raw[documents_at:modes_at].view("<i8").copy()
        self.modes = raw[modes_at:].view("i1").copy() if raw.size > modes_at else None

    def _check_arrays(self) -> None:
        if np.any(self.lengths < 0):
            where = int(np.argmax(self.lengths < 0))
            raise self._index_error(f"length {self.lengths[where]} of sequence {where}", "lengths of 0 or more")
        self.sequence_starts = np.zeros(len(self.lengths) + 1, dtype=np.int64)
        np.cumsum(self.lengths, out=self.sequence_starts[1:])
        wrong = self._pointers != self.sequence_starts[:-1] * self.dtype.itemsize
        if np.any(wrong):
            where = int(np.argmax(wrong))
            raise self._index_error(
                f"pointer {self._pointers[where]} of sequence {where}",
                f"{self.sequence_starts[where] * self.dtype.itemsize}: sequences back to back",
            )
        boundaries = self.document_indices
        if boundaries[0] != 0 or boundaries[-1] != len(self.lengths) or np.any(np.diff(boundaries) < 0):
            raise self._index_error(
                f"document boundaries from {boundaries[0]} to {boundaries[-1]}",
                f"boundaries that rise from 0 to {len(self.lengths)}, the number of sequences",
            )

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
        return np.memmap(self.data_path, dtype=self.dtype, mode="r")

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
    return np.memmap(path, dtype=np.uint8, mode="r")
