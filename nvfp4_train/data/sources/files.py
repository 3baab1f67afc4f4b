"""Which files a command reads: names, folders, globs, and the same on object stores."""

import glob
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nvfp4_train.data.error import DataError
from nvfp4_train.data.staging import is_uri, open_file_system

LINE_ENDINGS = (".jsonl", ".json", ".ndjson", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst")
TABLE_ENDINGS = (".parquet",)
TEXT_ENDINGS = (".txt", ".md")
ENDINGS = (*LINE_ENDINGS, *TABLE_ENDINGS, *TEXT_ENDINGS)
_EXPECTED = "files that end in " + ", ".join(ENDINGS)


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A file to read.

    Args:
        name: Path or URI.
        num_bytes: Its size.
        version: What changes when its content does: modification time, or what the object store says.
    """

    name: str
    num_bytes: int
    version: str


def find_source_files(inputs: list[str]) -> list[SourceFile]:
    """Return the files that the inputs name, each once.

    Files come in the order of ``inputs``, and sorted by name within a folder or glob. Folders are searched to any
    depth; names that begin with a dot are skipped, and so are empty files in folders.

    Raises:
        DataError: An input does not exist, matches no file that can be read, or names an empty file.
    """
    found: dict[str, SourceFile] = {}
    for given in inputs:
        files = _remote_files(given) if is_uri(given) else _local_files(given)
        if not files:
            raise DataError(given, found="no file to read", expected=_EXPECTED, fix="check the inputs")
        for file in files:
            key = file.name if is_uri(file.name) else str(Path(file.name).resolve())
            found.setdefault(key, file)
    return list(found.values())


def _local_files(given: str) -> list[SourceFile]:
    path = Path(os.path.expandvars(given)).expanduser()
    if path.is_file():
        _require_readable(str(path), path.stat().st_size)
        return [_local_file(path)]
    if path.is_dir():
        return [_local_file(file) for file in _walk(path)]
    if not glob.has_magic(str(path)):
        raise DataError(given, found="nothing there", expected="a file, a folder or a glob", fix="check the inputs")
    return [
        _local_file(file)
        for match in sorted(glob.glob(str(path), recursive=True))
        for file in (_walk(Path(match)) if Path(match).is_dir() else [Path(match)])
        if _is_readable(file.name) and file.stat().st_size
    ]


def _remote_files(given: str) -> list[SourceFile]:
    system, path = open_file_system(given)
    try:
        if glob.has_magic(path):
            paths = sorted(system.glob(path))
        elif system.isdir(path):
            paths = sorted(system.find(path))
        elif system.exists(path):
            _require_readable(given, system.size(path))
            paths = [path]
        else:
            raise DataError(given, found="nothing there", expected="a file, a folder or a glob", fix="check the inputs")
        return [
            SourceFile(name=system.unstrip_protocol(file), num_bytes=system.size(file), version=str(system.ukey(file)))
            for file in paths
            if _is_readable(file.rpartition("/")[2]) and system.isfile(file) and system.size(file)
        ]
    except OSError as error:
        raise DataError(given, found=str(error), expected="a place that can be read", fix="check the inputs") from error


def _require_readable(name: str, size: int) -> None:
    if not _is_readable(name.rpartition("/")[2]):
        raise DataError(name, found="a file of another type", expected=_EXPECTED, fix="rename or convert it")
    if size == 0:
        raise DataError(name, found="an empty file", expected="text", fix="take it out of the inputs")


def _walk(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if _is_readable(name) and path.is_file() and path.stat().st_size:
                yield path


def _is_readable(name: str) -> bool:
    return not name.startswith(".") and name.lower().endswith(ENDINGS)


def _local_file(path: Path) -> SourceFile:
    status = path.stat()
    return SourceFile(name=str(path), num_bytes=status.st_size, version=str(status.st_mtime_ns))
