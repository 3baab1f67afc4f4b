"""Write Megatron ``.bin/.idx`` pairs as a stream: memory does not grow with the number of documents."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np

from nvfp4_train.data.error import DataError
from nvfp4_train.data.indexed import CODE_OF_DTYPE, HEADER, MAGIC, VERSION, IndexedTokens
from nvfp4_train.data.spool import Spool

_CHUNK_ENTRIES = 1 << 20
_BUFFER_BYTES = 1 << 20
_COPY_BYTES = 1 << 24


@dataclass(frozen=True, kw_only=True)
class WriterState:
    """What of a pair is safely on disk.

    Args:
        num_sequences: Sequences written.
        num_documents: Documents ended.
        num_tokens: Tokens written.
    """

    num_sequences: int
    num_documents: int
    num_tokens: int


class IndexedWriter:
    """Write one pair; a context manager whose normal end puts both files in their place.

    Until then everything grows in files that end in ``.partial``, so what an exception or a kill leaves does not look
    complete. An exception deletes them, unless ``checkpoint`` was called: then writing can be taken up from there.

    Args:
        prefix: Path without ``.bin`` or ``.idx``.
        dtype: dtype of a token, one of Megatron's.
        has_modes: Whether each sequence carries an int8 mode, as in multimodal files.
        resume: Where to take up writing: what ``checkpoint`` returned; what was written after it is forgotten.

    Raises:
        ValueError: Unknown dtype.
        DataError: Less is on disk than ``resume`` says.
    """

    def __init__(
        self, prefix: Path, *, dtype: np.dtype, has_modes: bool = False, resume: WriterState | None = None
    ) -> None:
        self.dtype = np.dtype(dtype)
        if self.dtype not in CODE_OF_DTYPE:
            names = ", ".join(known.name for known in CODE_OF_DTYPE)
            raise ValueError(f"tokens of dtype {self.dtype} cannot be written; expected one of {names}")
        self._has_modes = has_modes
        self._data_path = prefix.with_name(prefix.name + ".bin")
        self._index_path = prefix.with_name(prefix.name + ".idx")
        self._partial_path = prefix.with_name(prefix.name + ".bin.partial")
        start = resume or WriterState(num_sequences=0, num_documents=0, num_tokens=0)
        self.num_sequences = start.num_sequences
        self.num_documents = start.num_documents
        self.num_tokens = start.num_tokens
        self._num_ended = start.num_sequences  # sequences that belong to a document that has ended
        self._has_checkpoint = resume is not None
        if resume is not None:
            self._reopen_finished(prefix)
        sizes = (start.num_sequences, start.num_documents, start.num_sequences if has_modes else 0)
        dtypes, parts = ("<i4", "<i8", "i1"), ("lengths", "documents", "modes")
        self._data = _open_partial(self._partial_path, start.num_tokens * self.dtype.itemsize)
        self._lengths, self._ends, self._modes = (
            Spool(_spool_path(prefix, part), dtype=dtype, keep=size)
            for part, dtype, size in zip(parts, dtypes, sizes, strict=True)
        )

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_finished = False
        try:
            if error_type is None:
                self._finish()
                is_finished = True
        finally:
            self._data.close()
            keep = self._has_checkpoint and not is_finished
            for spool in self._spools():
                spool.close(delete=not keep)
            if not keep:
                self._partial_path.unlink(missing_ok=True)

    def add_sequence(self, tokens: np.ndarray | Sequence[int], *, mode: int = 0) -> None:
        """Add a sequence to the open document.

        Args:
            tokens: [N] token ids, fewer than 2^31.
            mode: int8 mode; 0 where the pair has no modes.

        Raises:
            ValueError: A token does not fit the dtype, the sequence is too long, or the mode cannot be written.
        """
        array = self._checked(np.asarray(tokens))
        if mode and (not self._has_modes or not -128 <= mode <= 127):
            raise ValueError(f"mode {mode} cannot be written; expected an int8 in a pair with modes, else 0")
        self._data.write(array.data)
        self._lengths.add(array.size)
        if self._has_modes:
            self._modes.add(mode)
        self.num_sequences += 1
        self.num_tokens += array.size

    def end_document(self) -> None:
        """End the open document; without a sequence since the last end it is an empty document."""
        self._ends.add(self.num_sequences)
        self.num_documents += 1
        self._num_ended = self.num_sequences

    def add_document(self, tokens: np.ndarray | Sequence[int]) -> None:
        """Add a document of one sequence."""
        self.add_sequence(tokens)
        self.end_document()

    def add_documents(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Add many documents of one sequence each.

        Args:
            tokens: [N] token ids of all documents, end to end.
            lengths: [D] tokens of each document; they add up to N.

        Raises:
            ValueError: A token does not fit the dtype, the lengths do not add up, or a document is open.
        """
        self._require_ended()
        if len(lengths) and (lengths.sum() != tokens.size or lengths.min() < 0 or lengths.max() >= 1 << 31):
            raise ValueError(f"lengths add up to {lengths.sum()} (least {lengths.min()}) for {tokens.size} tokens")
        self._data.write(self._checked_values(tokens).data)
        self._lengths.extend(lengths)
        if self._has_modes:
            self._modes.extend(np.zeros(len(lengths), dtype=np.int8))
        self._ends.extend(np.arange(1, len(lengths) + 1) + self.num_sequences)
        self.num_sequences += len(lengths)
        self.num_documents += len(lengths)
        self._num_ended = self.num_sequences
        self.num_tokens += tokens.size

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
            shutil.copyfileobj(source, self._data, _COPY_BYTES)
        for first in range(0, other.num_sequences, _CHUNK_ENTRIES):
            self._lengths.extend(other.lengths[first : first + _CHUNK_ENTRIES])
            if other.modes is not None:
                self._modes.extend(other.modes[first : first + _CHUNK_ENTRIES])
        for first in range(1, other.num_documents + 1, _CHUNK_ENTRIES):
            self._ends.extend(other.document_indices[first : first + _CHUNK_ENTRIES] + self.num_sequences)
        self.num_sequences += other.num_sequences
        self._num_ended = self.num_sequences
        self.num_tokens += other.num_tokens
        self.num_documents += other.num_documents

    def checkpoint(self) -> WriterState:
        """Bring everything onto the disk and return the state to resume from; a failure keeps the files from now on.

        Raises:
            ValueError: A document is still open.
        """
        self._require_ended()
        _flush_to_disk(self._data)
        for spool in self._spools():
            spool.flush_to_disk()
        self._has_checkpoint = True
        return WriterState(
            num_sequences=self.num_sequences, num_documents=self.num_documents, num_tokens=self.num_tokens
        )

    def _spools(self) -> tuple[Spool, Spool, Spool]:
        return self._lengths, self._ends, self._modes

    def _checked(self, array: np.ndarray) -> np.ndarray:
        if array.size >= 1 << 31:
            raise ValueError(f"a sequence of {array.size} tokens cannot be written; expected fewer than 2^31")
        return self._checked_values(array)

    def _checked_values(self, array: np.ndarray) -> np.ndarray:
        if array.dtype == self.dtype:
            return np.ascontiguousarray(array)
        if array.size and self.dtype.kind != "f" and not _fits_by_bits(array, self.dtype):
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
            for piece in self._lengths.pieces():
                index.write(piece.data)
            self._write_pointers(index)
            index.write(np.zeros(1, dtype="<i8").data)
            for piece in (*self._ends.pieces(), *self._modes.pieces()):
                index.write(piece.data)
            _flush_to_disk(index)
        self._index_path.unlink(missing_ok=True)  # never an old index beside new tokens
        self._partial_path.replace(self._data_path)
        index_partial.replace(self._index_path)

    def _write_pointers(self, index: IO[bytes]) -> None:
        # Pointers are the exclusive prefix sum of the lengths, read back in pieces.
        position = 0
        for piece in self._lengths.pieces():
            sizes = piece.astype(np.int64) * self.dtype.itemsize
            ends = position + np.cumsum(sizes)
            index.write((ends - sizes).astype("<i8").data)
            position = int(ends[-1])

    def _reopen_finished(self, prefix: Path) -> None:
        """Undo ``_finish``, or the part of it that a kill let happen, so that writing can go on."""
        if self._index_path.is_file() and self._data_path.is_file():
            pair = IndexedTokens(prefix)
            modes = pair.modes if pair.modes is not None else np.zeros(0, dtype=np.int8)
            arrays = {"lengths": pair.lengths, "documents": pair.document_indices[1:], "modes": modes}
            for part, array in arrays.items():
                with _spool_path(prefix, part).open("wb") as spool:
                    spool.write(np.ascontiguousarray(array).data)
        self._index_path.unlink(missing_ok=True)
        if self._data_path.is_file() and not self._partial_path.is_file():
            self._data_path.rename(self._partial_path)


def _fits_by_bits(array: np.ndarray, dtype: np.dtype) -> bool:
    """Return True if one pass over the bits shows that every number fits; False where that takes a closer look."""
    return array.dtype.kind in "iu" and 0 <= int(np.bitwise_or.reduce(array, axis=None)) <= np.iinfo(dtype).max


def _spool_path(prefix: Path, part: str) -> Path:
    # On the target's disk, not in /tmp, which may be small or in memory.
    return prefix.with_name(f"{prefix.name}.idx.{part}.partial")


def _open_partial(path: Path, size: int) -> IO[bytes]:
    if size == 0:
        return path.open("wb", buffering=_BUFFER_BYTES)
    found = path.stat().st_size if path.is_file() else 0
    if found < size:
        raise DataError(
            path, found=f"{found} bytes", expected=f"at least {size}, which were written before", fix="start over"
        )
    file = path.open("r+b", buffering=_BUFFER_BYTES)
    file.truncate(size)
    file.seek(size)
    return file


def _flush_to_disk(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
