"""A growing array in a file, for what is known one number at a time but is needed whole at the end."""

import os
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from nvfp4_train.data.error import DataError

_PENDING = 1 << 14  # numbers that wait in memory: a list append is several times cheaper than a write
_PIECE = 1 << 20
_TYPECODE = {"i1": "b", "<i4": "i", "<i8": "q"}


class Spool:
    """Numbers in the order in which they were added.

    Args:
        path: File to write; an existing one is replaced, or continued after ``keep`` numbers.
        dtype: Their dtype.
        keep: Numbers to keep of the file that is there.

    Raises:
        DataError: The file holds fewer than ``keep``.
    """

    def __init__(self, path: Path, *, dtype: str, keep: int = 0) -> None:
        self._path = path
        self._dtype = np.dtype(dtype)
        self._pending = array(_TYPECODE[dtype])
        found = path.stat().st_size // self._dtype.itemsize if path.is_file() else 0
        if found < keep:
            raise DataError(path, found=f"{found} numbers", expected=f"at least {keep}", fix="start over")
        self._file = path.open("r+b" if keep else "w+b")
        self._file.truncate(keep * self._dtype.itemsize)
        self._file.seek(0, os.SEEK_END)

    def add(self, number: int) -> None:
        """Add one number."""
        self._pending.append(number)
        if len(self._pending) >= _PENDING:
            self._write_pending()

    def extend(self, numbers: np.ndarray) -> None:
        """Add many."""
        self._write_pending()
        self._file.write(np.ascontiguousarray(numbers, dtype=self._dtype).data)

    def pieces(self) -> Iterator[np.ndarray]:
        """Yield all numbers, in pieces that fit in memory; nothing may be added meanwhile."""
        self._write_pending()
        self._file.seek(0)
        while piece := self._file.read(_PIECE * self._dtype.itemsize):
            yield np.frombuffer(piece, dtype=self._dtype)

    def flush_to_disk(self) -> None:
        """Bring everything onto the disk."""
        self._write_pending()
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self, *, delete: bool) -> None:
        """Close the file, and delete it or leave it for a later process."""
        self._file.close()
        if delete:
            self._path.unlink(missing_ok=True)

    def _write_pending(self) -> None:
        if self._pending:
            self._file.write(self._pending)
            self._pending = array(self._pending.typecode)
