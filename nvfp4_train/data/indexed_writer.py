"""Write Megatron ``.bin/.idx`` pairs as a stream: memory does not grow with the number of documents."""

import os
import shutil
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np

from nvfp4_train.data.error import DataError
from nvfp4_train.data.indexed import CODE_OF_DTYPE, HEADER, MAGIC, VERSION, IndexedTokens

_CHUNK_ENTRIES = 1 << 20
_LENGTH = struct.Struct("<i")
_BOUNDARY = struct.Struct("<q")
_MODE = struct.Struct("b")


class IndexedWriter:
    """Write one pair; a context manager whose normal end puts both files in their place.

    Until then the tokens grow in ``PREFIX.bin.partial`` and the index in anonymous temporary files beside it, so an
    exception or a kill leaves nothing that looks complete.

    Args:
        prefix: Path without ``.bin`` or ``.idx``.
        dtype: dtype of a token, one of Megatron's.
        has_modes: Whether each sequence carries an int8 mode, as in multimodal files.

    Raises:
        ValueError: Unknown dtype.
    """

    def __init__(self, prefix: Path, *, dtype: np.dtype, has_modes: bool = False) -> None:
        self.dtype = np.dtype(dtype)
        if self.dtype not in CODE_OF_DTYPE:
            names = ", ".join(known.name for known in CODE_OF_DTYPE)
            raise ValueError(f"tokens of dtype {self.dtype} cannot be written; expected one of {names}")
        self.num_sequences = 0
        self.num_tokens = 0
        self.num_documents = 0
        self._has_modes = has_modes
        self._data_path = prefix.with_name(prefix.name + ".bin")
        self._index_path = prefix.with_name(prefix.name + ".idx")
        self._partial_path = prefix.with_name(prefix.name + ".bin.partial")
        self._data = self._partial_path.open("wb")
        self._lengths = _open_spool(prefix.parent)
        self._boundaries = _open_spool(prefix.parent)
        self._modes = _open_spool(prefix.parent)
        self._boundaries.write(_BOUNDARY.pack(0))
        self._num_ended = 0  # sequences that belong to a document that has ended

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error_type is None:
                self._finish()
        finally:
            for file in (self._data, self._lengths, self._boundaries, self._modes):
                file.close()
            self._partial_path.unlink(missing_ok=True)

    def add_sequence(self, tokens: np.ndarray | Sequence[int], *, mode: int = 0) -> None:
        """Add a sequence to the open document.

        Args:
            tokens: [N] token ids, fewer than 2^31.
            mode: int8 mode, written only where the pair has modes.

        Raises:
            ValueError: A token does not fit the dtype, or the sequence is too long.
        """
        array = self._checked(np.asarray(tokens))
        self._data.write(array.data)
        self._lengths.write(_LENGTH.pack(array.size))
        if self._has_modes:
            self._modes.write(_MODE.pack(mode))
        self.num_sequences += 1
        self.num_tokens += array.size

    def end_document(self) -> None:
        """End the open document; without a sequence since the last end it is an empty document."""
        self._boundaries.write(_BOUNDARY.pack(self.num_sequences))
        self.num_documents += 1
        self._num_ended = self.num_sequences

    def add_document(self, tokens: np.ndarray | Sequence[int]) -> None:
        """Add a document of one sequence."""
        self.add_sequence(tokens)
        self.end_document()

    def append(self, prefix: Path) -> None:
        """Add all documents of another pair.

        Raises:
            DataError: The other pair is damaged, has another dtype, or has modes where this one has none (or not).
            ValueError: A document is still open.
        """
        self._require_ended()
        other = IndexedTokens(prefix)
        if other.dtype != self.dtype:
            raise DataError(
                other.index_path,
                found=f"tokens of {other.dtype.name}",
                expected=f"{self.dtype.name}, as in the pair that is being written",
                fix="tokenize both with the same tokenizer and dtype",
            )
        if (other.modes is not None) != self._has_modes and other.num_sequences:
            raise DataError(
                other.index_path,
                found="modes" if other.modes is not None else "no modes",
                expected="modes" if self._has_modes else "no modes, as in the pair that is being written",
                fix="append multimodal pairs only to multimodal pairs",
            )
        with other.data_path.open("rb") as source:
            shutil.copyfileobj(source, self._data, 1 << 24)
        _write_array(self._lengths, other.lengths)
        if other.modes is not None:
            _write_array(self._modes, other.modes)
        _write_array(self._boundaries, other.document_indices[1:] + self.num_sequences)
        self.num_sequences += other.num_sequences
        self._num_ended = self.num_sequences
        self.num_tokens += other.num_tokens
        self.num_documents += other.num_documents

    def _checked(self, array: np.ndarray) -> np.ndarray:
        if array.size >= 1 << 31:
            raise ValueError(f"a sequence of {array.size} tokens cannot be written; expected fewer than 2^31")
        if array.dtype == self.dtype:
            return np.ascontiguousarray(array)
        if array.size and self.dtype.kind != "f":
            limits = np.iinfo(self.dtype)
            low, high = array.min(), array.max()
            if array.dtype.kind not in "iu" or low < limits.min or high > limits.max:
                raise ValueError(
                    f"tokens from {low} to {high} ({array.dtype}) do not fit {self.dtype.name} "
                    f"({limits.min} to {limits.max}); choose a larger dtype"
                )
        return array.astype(self.dtype)

    def _require_ended(self) -> None:
        if self._num_ended != self.num_sequences:
            open_sequences = self.num_sequences - self._num_ended
            raise ValueError(f"{open_sequences} sequences belong to no document; call end_document first")

    def _finish(self) -> None:
        self._require_ended()
        _flush_to_disk(self._data)
        index_partial = self._index_path.with_name(self._index_path.name + ".partial")
        with index_partial.open("wb") as index:
            code = CODE_OF_DTYPE[self.dtype]
            index.write(HEADER.pack(MAGIC, VERSION, code, self.num_sequences, self.num_documents + 1))
            _copy_spool(self._lengths, index)
            self._write_pointers(index)
            _copy_spool(self._boundaries, index)
            _copy_spool(self._modes, index)
            _flush_to_disk(index)
        self._index_path.unlink(missing_ok=True)  # never an old index beside new tokens
        self._partial_path.replace(self._data_path)
        index_partial.replace(self._index_path)

    def _write_pointers(self, index: IO[bytes]) -> None:
        # Pointers are the exclusive prefix sum of the lengths, read back in pieces.
        self._lengths.seek(0)
        position = 0
        while piece := self._lengths.read(4 * _CHUNK_ENTRIES):
            sizes = np.frombuffer(piece, dtype="<i4").astype(np.int64) * self.dtype.itemsize
            ends = position + np.cumsum(sizes)
            _write_array(index, (ends - sizes).astype("<i8"))
            position = int(ends[-1])


def _open_spool(folder: Path) -> IO[bytes]:
    # On the target's disk, not in /tmp, which may be small or in memory.
    return tempfile.TemporaryFile(dir=folder)


def _write_array(target: IO[bytes], array: np.ndarray) -> None:
    target.write(np.ascontiguousarray(array).data)


def _copy_spool(spool: IO[bytes], target: IO[bytes]) -> None:
    spool.seek(0)
    shutil.copyfileobj(spool, target, 1 << 24)


def _flush_to_disk(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
