"""Which files hold the text, and how documents are read from them."""

import gzip
import hashlib
import importlib.util
import io
import json
import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from nvfp4_train.config.data import PythonStdlibDataConfig, TextDataConfig, TextFilesDataConfig
from nvfp4_train.data.error import DataError
from nvfp4_train.data.text_paths import find_text_files

_READ_BYTES = 1 << 20
# Installed packages are not the standard library, and differ from machine to machine.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}


class FileKind(StrEnum):
    """How documents lie in a file."""

    text = "text"  # the file is one document
    jsonl = "jsonl"  # a document a line, plain or gzip
    topics = "topics"  # ``pydoc_data.topics`` of the running interpreter, a document a topic


@dataclass(frozen=True, kw_only=True)
class CorpusFile:
    """A file of the corpus.

    Args:
        path: Where it is.
        kind: How documents lie in it.
        jsonl_key: Key that holds the text of a jsonl line; empty for other kinds.
    """

    path: Path
    kind: FileKind
    jsonl_key: str = ""


@dataclass(frozen=True, kw_only=True)
class Document:
    """One document.

    Args:
        text: Its text, not empty.
        digest: 16 bytes that depend on the text only; the validation split and the tokenizer's sample are drawn by it.
    """

    text: str
    digest: bytes


def corpus_files(cfg: TextDataConfig) -> list[CorpusFile]:
    """Return the files of a corpus in their fixed order.

    Raises:
        DataError: A path is missing or empty, or nothing matches.
    """
    match cfg:
        case PythonStdlibDataConfig():
            return _stdlib_files(Path(sysconfig.get_paths()["stdlib"]))
        case TextFilesDataConfig():
            return [_text_file(path, cfg.jsonl_key) for path in find_text_files(cfg.paths)]
        case _:
            raise TypeError(f"no reader for {type(cfg).__name__}")


def corpus_fingerprint(files: Iterable[CorpusFile]) -> str:
    """Return a hash of what the files contain, in their order; names and places do not count."""
    files = list(files)
    total = hashlib.blake2b(digest_size=16)
    # hashlib and file reads release the GIL.
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        for file, digest in zip(files, pool.map(_file_digest, files), strict=True):
            total.update(f"{file.kind}/{file.jsonl_key}/".encode() + digest)
    return total.hexdigest()


def read_documents(files: Iterable[CorpusFile]) -> Iterator[Document]:
    """Yield every document that is not empty, in the order of the files.

    Bytes that are not UTF-8 become U+FFFD, and a byte-order mark is dropped.

    Raises:
        DataError: A jsonl line is not valid, or a file cannot be read to its end.
    """
    for file in files:
        for text in _texts(file):
            # A lone surrogate, which JSON can spell, is not text: it becomes '?'.
            encoded = text.encode(errors="replace")
            if encoded:
                digest = hashlib.blake2b(encoded, digest_size=16).digest()
                yield Document(text=encoded.decode(), digest=digest)


def _texts(file: CorpusFile) -> Iterator[str]:
    match file.kind:
        case FileKind.text:
            yield _decode(file.path.read_bytes())
        case FileKind.jsonl:
            yield from _jsonl_texts(file)
        case FileKind.topics:
            from pydoc_data.topics import topics  # part of the corpus, not a dependency

            yield from (topics[name] for name in sorted(topics))


def _decode(raw: bytes) -> str:
    return raw.decode("utf-8-sig", errors="replace")


def _jsonl_texts(file: CorpusFile) -> Iterator[str]:
    try:
        with _open_jsonl(file.path) as lines:
            for number, raw in enumerate(lines, start=1):
                if raw.strip():
                    yield _jsonl_text(file, raw, number)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            file.path,
            found=f"damaged gzip data ({error})",
            expected="a complete gzip file",
            fix="copy or write it again",
        ) from error


def _open_jsonl(path: Path) -> io.BufferedIOBase:
    return gzip.GzipFile(path) if path.suffix.lower() == ".gz" else path.open("rb")


def _jsonl_text(file: CorpusFile, raw: bytes, number: int) -> str:
    where = f"{file.path}:{number}"
    try:
        row = json.loads(_decode(raw))
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, and nesting as deep
        raise DataError(
            where, found=f"invalid JSON ({error})", expected="one JSON object a line", fix="repair or delete the line"
        ) from error
    if not isinstance(row, dict):
        raise DataError(where, found=f"a JSON {type(row).__name__}", expected="a JSON object", fix="repair the line")
    if file.jsonl_key not in row:
        raise DataError(
            where, found=f"keys {sorted(row)}", expected=f"the key {file.jsonl_key!r}",
            fix="data.jsonl_key=NAME names the key that holds the text",
        )  # fmt: skip
    text = row[file.jsonl_key]
    if not isinstance(text, str):
        raise DataError(
            where, found=f"{file.jsonl_key!r} holds {type(text).__name__}", expected="a string", fix="repair the line"
        )
    return text


def _stdlib_files(root: Path) -> list[CorpusFile]:
    topics = importlib.util.find_spec("pydoc_data.topics")
    topics_path = Path(topics.origin).resolve() if topics is not None and topics.origin else None
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in _SKIPPED_FOLDERS)
        for name in sorted(names):
            path = Path(folder, name)
            if path.suffix == ".py" and path.is_file():
                is_topics = path.resolve() == topics_path
                files.append(CorpusFile(path=path, kind=FileKind.topics if is_topics else FileKind.text))
    if not files:
        raise DataError(
            root, found="no .py files", expected="the sources of Python's standard library",
            fix="use a Python that has its sources, or data=text_files with your own text",
        )  # fmt: skip
    return files


def _text_file(path: Path, jsonl_key: str) -> CorpusFile:
    if path.suffix.lower() in (".txt", ".md"):
        return CorpusFile(path=path, kind=FileKind.text)
    return CorpusFile(path=path, kind=FileKind.jsonl, jsonl_key=jsonl_key)


def _file_digest(file: CorpusFile) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    with file.path.open("rb", buffering=0) as source:
        while piece := source.read(_READ_BYTES):
            digest.update(piece)
    return digest.digest()
