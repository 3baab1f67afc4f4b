"""Bring files from object stores onto a local disk: whole, checked, and never more than the disk should hold."""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from nvfp4_train.data.error import DataError
from nvfp4_train.data.manifest import file_digest
from nvfp4_train.data.write import write_json

_COPY_BYTES = 1 << 22
_ATTEMPTS = 3


def is_uri(name: str) -> bool:
    """Return whether a name is a URI of an object store or another file system, rather than a local path."""
    return "://" in name and not name.startswith("file://")


def open_file_system(uri: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URI, and the path in it.

    Raises:
        DataError: The protocol is not known, or its library is not installed.
    """
    import fsspec

    try:
        system, path = fsspec.url_to_fs(uri)
    except (ImportError, ValueError) as error:
        raise DataError(
            uri, found=str(error), expected="a protocol that fsspec knows, with its library installed",
            fix="install the library, for example `pip install s3fs` for s3://, or copy the files here",
        ) from error  # fmt: skip
    return system, str(path)


class Staging:
    """A folder of local copies, shared by all processes of a machine.

    A copy gets its name only when it is complete and its checksum is right. Copies stay for later runs. Room for a new
    one comes from those that were not used for longest; a copy that any process holds is not removed.

    Args:
        cache_dir: The folder; created if missing.
        max_bytes: What all copies may take together.
    """

    def __init__(self, cache_dir: Path, *, max_bytes: int) -> None:
        self._cache_dir = cache_dir
        self._max_bytes = max_bytes
        self._held: dict[Path, IO[bytes]] = {}  # the lock of each copy that this object holds

    def __enter__(self) -> "Staging":
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of all copies; they stay until their room is needed."""
        for path in list(self._held):
            self.release(path)

    def release(self, path: Path) -> None:
        """Let go of one copy; paths that are no copies are ignored."""
        lock = self._held.pop(path, None)
        if lock is not None:
            lock.close()

    def file(self, name: str, *, digest: str = "") -> Path:
        """Return a local file with the content of ``name``, held until it is released.

        Args:
            name: URI or local path; a local path is returned as it is.
            digest: What ``file_digest`` must give; empty where that is not known.

        Raises:
            DataError: The file cannot be read, its checksum is wrong, or there is no room for it.
        """
        if not is_uri(name):
            return Path(name.removeprefix("file://"))
        system, remote = open_file_system(name)
        try:
            size, version = int(system.size(remote)), str(system.ukey(remote))
        except (OSError, TypeError) as error:
            raise DataError(name, found=str(error), expected="a file", fix="check the path and the rights") from error
        path = self._local_path(name)
        self._hold(path)
        with _exclusive(self._cache_dir):
            if not _is_copy(path, size=size, version=version, digest=digest):
                _forget(path)
                self._make_room(size, name)
                _download(system, remote, path, size=size, digest=digest)
                details = {"name": name, "version": version, "digest": file_digest(path)}
                write_json(_details_path(path), details | {"mtime": path.stat().st_mtime_ns})
            os.utime(_details_path(path))  # when it was used last
        return path

    def pair(self, prefix: str) -> Path:
        """Return the local prefix of a ``.bin/.idx`` pair, both files held.

        Checksums are those of the manifest beside the pair, where there is one.

        Args:
            prefix: URI or local path, without ``.bin`` or ``.idx``.

        Raises:
            DataError: As for ``file``.
        """
        if not is_uri(prefix):
            return Path(prefix.removeprefix("file://"))
        digests = _remote_digests(prefix)
        index = self.file(f"{prefix}.idx", digest=digests.get(".idx", ""))
        data = self.file(f"{prefix}.bin", digest=digests.get(".bin", ""))
        assert index.with_suffix("") == data.with_suffix("")
        return index.with_suffix("")

    def _local_path(self, name: str) -> Path:
        folder, _, file_name = name.rpartition("/")
        key = hashlib.blake2b(folder.encode(), digest_size=8).hexdigest()
        path = self._cache_dir / key / file_name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _hold(self, path: Path) -> None:
        if path in self._held:
            return
        while path not in self._held:
            lock = _lock_path(path).open("ab")
            fcntl.flock(lock, fcntl.LOCK_SH)
            if _is_current(lock, _lock_path(path)):  # not removed while we waited
                self._held[path] = lock
            else:
                lock.close()

    def _make_room(self, size: int, name: str) -> None:
        for partial in self._cache_dir.glob("*/*.partial"):
            partial.unlink()  # under the lock nobody is writing it: a killed process left it
        copies = [path.with_suffix("") for path in self._cache_dir.glob("*/*.details")]
        copies = [path for path in copies if path.is_file()]
        taken = sum(path.stat().st_size for path in copies)
        for path in sorted(copies, key=lambda copy: _details_path(copy).stat().st_mtime_ns):
            if taken + size <= self._max_bytes:
                break
            freed = path.stat().st_size
            if path not in self._held and _remove_unused(path):
                taken -= freed
        if taken + size > self._max_bytes:
            raise DataError(
                name,
                found=f"{size:,} bytes, where {taken:,} of {self._max_bytes:,} are taken by files in use",
                expected=f"room in {self._cache_dir}",
                fix="allow more bytes for local copies, or use fewer files at once",
            )


def _remote_digests(prefix: str) -> dict[str, str]:
    """Return the checksums of a pair from the manifest beside it: its own, or that of the set it is a shard of."""
    system, path = open_file_system(prefix)
    folder, _, name = path.rpartition("/")
    candidates = [f"{path}.manifest.json", f"{folder}/{name.rpartition('_')[0]}.manifest.json"]
    for candidate in candidates:
        try:
            if not system.exists(candidate):
                continue
            shards = json.loads(system.cat_file(candidate))["shards"]
            found = [shard for shard in shards if shard["name"] == name]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                candidate, found=f"no readable manifest ({error!r})", expected="what `prepare_data.py` wrote",
                fix="copy it again",
            ) from error  # fmt: skip
        if found:
            return {".bin": found[0]["bin_digest"], ".idx": found[0]["idx_digest"]}
    return {}


def _is_copy(path: Path, *, size: int, version: str, digest: str) -> bool:
    """Return whether the copy is whole and that of the file as it is now."""
    try:
        details = json.loads(_details_path(path).read_text())
        status = path.stat()
    except (OSError, ValueError):
        return False
    if details["version"] != version or status.st_size != size or (digest and details["digest"] != digest):
        return False
    # A copy that nobody touched since its checksum was taken need not be read again.
    return details["mtime"] == status.st_mtime_ns or file_digest(path) == details["digest"]


def _download(system: Any, remote: str, path: Path, *, size: int, digest: str) -> None:
    partial = path.with_name(path.name + ".partial")
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            with system.open(remote, "rb") as source, partial.open("wb") as target:
                shutil.copyfileobj(source, target, _COPY_BYTES)
                target.flush()
                os.fsync(target.fileno())
            problem = _difference(partial, size=size, digest=digest)
        except OSError as error:
            problem = str(error)
        if not problem:
            partial.replace(path)
            return
        partial.unlink(missing_ok=True)
        if attempt == _ATTEMPTS:
            raise DataError(
                remote, found=f"{problem}, {_ATTEMPTS} times", expected=f"{size:,} bytes with the right checksum",
                fix="check the network and free disk space, or copy the files to the store again",
            )  # fmt: skip


def _difference(path: Path, *, size: int, digest: str) -> str:
    found = path.stat().st_size
    if found != size:
        return f"{found:,} bytes"
    if digest and file_digest(path) != digest:
        return "a wrong checksum"
    return ""


def _remove_unused(path: Path) -> bool:
    """Remove a copy unless a process holds it."""
    with _lock_path(path).open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        _forget(path)
        _lock_path(path).unlink(missing_ok=True)
        return True


def _forget(path: Path) -> None:
    _details_path(path).unlink(missing_ok=True)
    path.unlink(missing_ok=True)


@contextlib.contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Let one process at a time look for a copy and make it, so that the bound holds for all of them together."""
    with (folder / "making.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _is_current(lock: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(lock.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _details_path(path: Path) -> Path:
    return path.with_name(path.name + ".details")


def _lock_path(path: Path) -> Path:
    return path.with_name(path.name + ".lock")
