"""Find the user's text files from a list of files, folders and globs."""

import glob
import os
from collections.abc import Iterator
from pathlib import Path

from nvfp4_train.data.error import DataError

TEXT_ENDINGS = (".txt", ".md", ".jsonl", ".jsonl.gz")
_EXPECTED = "files that end in " + ", ".join(TEXT_ENDINGS)


def find_text_files(paths: list[str]) -> list[Path]:
    """Return the text files that the paths name, each once.

    Files come in the order of ``paths``, and sorted by name within a folder or glob. Folders are searched to any depth;
    names that begin with a dot are skipped. ``~`` and environment variables are expanded.

    Raises:
        DataError: A path does not exist, matches no text file, or names an empty file.
    """
    found: dict[Path, Path] = {}  # by resolved path, so that overlapping paths give a file once
    for path in paths:
        for file in _expand(path):
            found.setdefault(file.resolve(), file)
    return list(found.values())


def _expand(given: str) -> list[Path]:
    path = Path(os.path.expandvars(given)).expanduser()
    if path.is_file():
        return [_named_file(path)]
    if path.is_dir():
        files = list(_walk(path))
    else:
        files = [file for match in sorted(glob.glob(str(path), recursive=True)) for file in _matched(Path(match))]
        if not files and not glob.has_magic(str(path)):
            raise DataError(path, found="nothing there", expected="a file, a folder or a glob", fix="check data.paths")
    if not files:
        raise DataError(path, found="no text file", expected=_EXPECTED, fix="check data.paths, or rename the files")
    return files


def _named_file(path: Path) -> Path:
    if not _is_text(path):
        raise DataError(path, found=f"a file of type {path.suffix!r}", expected=_EXPECTED, fix="rename or convert it")
    if path.stat().st_size == 0:
        raise DataError(path, found="an empty file", expected="text", fix="take it out of data.paths")
    return path


def _matched(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from _walk(path)
    elif _is_text(path) and path.is_file():  # a named pipe would be read for ever
        yield path


def _walk(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if not name.startswith(".") and _is_text(path) and path.is_file():
                yield path


def _is_text(path: Path) -> bool:
    return path.name.lower().endswith(TEXT_ENDINGS)
