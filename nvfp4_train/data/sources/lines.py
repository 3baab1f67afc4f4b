"""Lines and whole texts from files, plain or compressed."""

import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from nvfp4_train.data.error import DataError
from nvfp4_train.data.sources.record import RecordBatch, RecordKind

_BATCH_BYTES = 1 << 20
_PACKED_BYTES = 1 << 17


def read_lines(path: Path, *, place: str, column: str, start: dict[str, Any]) -> Iterator[RecordBatch]:
    """Yield the lines of a jsonl file; ``.gz`` and ``.zst`` are unpacked.

    Args:
        path: Local file.
        place: How to name it in errors.
        column: Key that holds the text.
        start: ``offset``, bytes of unpacked text to skip, and ``record``, lines in them; empty for the beginning.

    Raises:
        DataError: The file cannot be read to its end.
    """
    damage: tuple[type[Exception], ...] = (EOFError, gzip.BadGzipFile, zlib.error, *_zstd_errors(path))
    offset, record = start.get("offset", 0), start.get("record", 0)
    size = max(1, path.stat().st_size)
    try:
        with path.open("rb") as raw, _unpacked(path, raw) as lines:
            if lines.seek(offset) != offset:
                raise EOFError("fewer bytes than were read before")
            # `readlines` with a hint returns whole lines, the last one as long as it may be.
            while batch := lines.readlines(_BATCH_BYTES):
                offset += sum(map(len, batch))
                yield RecordBatch(
                    place=place,
                    kind=RecordKind.line,
                    column=column,
                    first=record + 1,
                    records=batch,
                    cursor={"offset": offset, "record": record + len(batch)},
                    fraction=min(1.0, raw.tell() / size),
                )
                record += len(batch)
    except damage as error:
        raise DataError(
            place,
            found=f"damaged data after {record} lines ({error})",
            expected="a complete file",
            fix="copy or write it again",
        ) from error


def read_text(path: Path, *, place: str) -> Iterator[RecordBatch]:
    """Yield a text file as one record."""
    yield RecordBatch(
        place=place,
        kind=RecordKind.file,
        column="",
        first=1,
        records=[path.read_bytes()],
        cursor={},
        fraction=1.0,
    )


def _unpacked(path: Path, raw: IO[bytes]) -> io.BufferedIOBase:
    match path.suffix.lower():
        case ".gz":
            return gzip.GzipFile(fileobj=raw)
        case ".zst":
            return _SeekableFrames(_ZstdFrames(raw), buffer_size=_BATCH_BYTES)
    return raw  # type: ignore[return-value]


class _ZstdFrames(io.RawIOBase):
    """Unpacks zstandard frames, and does not take a file that ends in the middle of one for a whole file.

    The library's own reader does: it gives what is there and no error.
    """

    def __init__(self, packed: IO[bytes]) -> None:
        from zstandard import ZstdDecompressor

        self._packed = packed
        self._decompressor = ZstdDecompressor(max_window_size=1 << 31)  # as `zstd --long=31` needs
        self._frame = self._decompressor.decompressobj()
        self._input = b""
        self._output = memoryview(b"")
        self._is_inside = False

    def readable(self) -> bool:
        """Return True: it is made to be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer with what comes next; 0 at the end.

        Raises:
            EOFError: The file ends in the middle of a frame.
        """
        while not self._output:
            self._input = self._input or self._packed.read(_PACKED_BYTES)
            if not self._input:
                if self._is_inside:
                    raise EOFError("the file ends in the middle of a frame")
                return 0
            self._unpack()
        count = min(len(buffer), len(self._output))
        buffer[:count] = self._output[:count]
        self._output = self._output[count:]
        return count

    def _unpack(self) -> None:
        self._output = memoryview(self._frame.decompress(self._input))
        self._input = b""
        self._is_inside = not self._frame.eof
        if self._frame.eof:
            self._input = self._frame.unused_data
            self._frame = self._decompressor.decompressobj()


class _SeekableFrames(io.BufferedReader):
    """A buffered reader over a zstandard stream, which can seek forward only, and only relative to its position."""

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Read and forget everything before ``offset``."""
        assert whence == io.SEEK_SET
        position = 0
        while position < offset:
            skipped = len(self.read(min(_BATCH_BYTES, offset - position)))
            if not skipped:
                break
            position += skipped
        return position


def _zstd_errors(path: Path) -> tuple[type[Exception], ...]:
    if path.suffix.lower() != ".zst":
        return ()
    try:
        from zstandard import ZstdError
    except ImportError as error:
        raise DataError(
            path, found="no library `zstandard`", expected="it to be installed", fix="pip install 'nvfp4-train[data]'"
        ) from error
    return (ZstdError,)
