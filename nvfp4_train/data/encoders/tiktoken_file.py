"""Ranks of the tiktoken library: a text file with one base64 token and its rank a line.

The file holds neither the pattern that splits text into words nor the special tokens. Both are known here for the
published encodings, recognized by their number of ranks; for another file the user gives the pattern, and the id after
the last rank ends a document.
"""

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from nvfp4_train.data.error import DataError
from nvfp4_train.data.manifest import file_digest, text_digest

_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
_CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"
    r"|\s+(?!\S)|\s"
)
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_O200K = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


@dataclass(frozen=True)
class _Published:
    """A published encoding: its pattern and its special tokens."""

    pattern: str
    end_name: str
    end_id: int
    vocab_size: int


# By number of ranks. Source: tiktoken's openai_public and Llama 3's tokenizer (256 reserved ids after the ranks).
_PUBLISHED = {
    50256: _Published(_GPT2, "<|endoftext|>", 50256, 50257),
    100256: _Published(_CL100K, "<|endoftext|>", 100257, 100277),
    128000: _Published(_LLAMA3, "<|end_of_text|>", 128001, 128256),
    199998: _Published(_O200K, "<|endoftext|>", 199999, 200019),
}


class TiktokenEncoder:
    """A ``.tiktoken`` file.

    Args:
        path: The file.
        name: How the user named it.
        pattern: Regular expression that splits text into words; empty to take that of the published encoding.

    Raises:
        DataError: The file cannot be read, its pattern is not known, or the library is missing.
    """

    def __init__(self, path: Path, *, name: str, pattern: str = "") -> None:
        ranks = _read_ranks(path)
        known = _PUBLISHED.get(len(ranks))
        if not pattern and known is None:
            raise DataError(
                path, found=f"{len(ranks)} ranks, no published encoding", expected=f"one of {sorted(_PUBLISHED)}",
                fix="give its pattern: --tiktoken-pattern REGEX",
            )  # fmt: skip
        if pattern or known is None:
            last = max(ranks.values())
            known = _Published(pattern, "<|endoftext|>", last + 1, last + 2)
        self._encoding = _build(path, ranks, known)
        self.name = name
        self.library = f"tiktoken {version('tiktoken')}"
        self.digest = text_digest(f"{file_digest(path)}/{known}")
        self.vocab_size = known.vocab_size
        self.end_of_document: int | None = known.end_id
        self._end_name = known.end_name

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, int32 [N]."""
        return [np.asarray(self._encoding.encode_ordinary(text), dtype=np.int32) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some ids, the end of a document included."""
        return str(self._encoding.decode(list(ids)))

    def special_id(self, token: str) -> int | None:
        """Return the id of the end-of-document token, the only special token that is known."""
        return self.end_of_document if token == self._end_name else None


def _build(path: Path, ranks: dict[bytes, int], known: _Published) -> Any:
    try:
        import tiktoken
    except ImportError as error:
        raise DataError(
            path, found="no library `tiktoken`", expected="it to be installed", fix="pip install 'nvfp4-train[data]'"
        ) from error
    try:
        return tiktoken.Encoding(
            path.name, pat_str=known.pattern, mergeable_ranks=ranks, special_tokens={known.end_name: known.end_id}
        )
    except ValueError as error:
        raise DataError(path, found=str(error), expected="a valid pattern", fix="check --tiktoken-pattern") from error


def _read_ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise DataError(
                f"{path}:{number}", found=f"{line[:40]!r}", expected="a base64 token and its rank", fix="check the path"
            ) from error
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise DataError(
            path, found=f"{len(ranks)} ranks without byte {missing[0]}", expected="a rank for each of the 256 bytes",
            fix="check that the file is complete",
        )  # fmt: skip
    return ranks
