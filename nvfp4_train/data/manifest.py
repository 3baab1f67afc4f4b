"""The manifest beside tokenized files: what they hold, what made them, and hashes of both."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from nvfp4_train.data.error import DataError
from nvfp4_train.data.write import write_json


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One ``.bin/.idx`` pair.

    Args:
        name: Its file name without ``.bin`` or ``.idx``, beside the manifest.
        num_documents: Documents in it.
        num_tokens: Tokens in it.
        bin_digest: Hash of the ``.bin`` file.
        idx_digest: Hash of the ``.idx`` file.
    """

    name: str
    num_documents: int
    num_tokens: int
    bin_digest: str
    idx_digest: str


@dataclass(frozen=True, kw_only=True)
class TokenizerRecord:
    """The tokenizer that made the tokens.

    Args:
        name: How the user named it.
        digest: Hash of everything that its ids depend on.
        vocab_size: Ids lie below it.
        end_of_document: Id that ends each document, or None where none was appended.
    """

    name: str
    digest: str
    vocab_size: int
    end_of_document: int | None


@dataclass(frozen=True, kw_only=True)
class SourceRecord:
    """One file or dataset that was read.

    Args:
        name: Path, URI or name.
        num_bytes: Size of the file; None for a dataset.
        digest: Hash of the file; for a dataset, what its library knows of its version.
    """

    name: str
    num_bytes: int | None
    digest: str


@dataclass(frozen=True, kw_only=True)
class TokenManifest:
    """What some shards hold; ``NAME.manifest.json``.

    Args:
        num_documents: Documents in all shards.
        num_tokens: Tokens in all shards, end-of-document tokens included.
        num_empty: Records that held no text and gave no document.
        num_errors: Records that could not be read and were skipped.
        errors: The first of them: place and reason.
        dtype: dtype of a token.
        tokenizer: What made the tokens; None where pairs without a manifest were merged.
        text_digest: Hash of all texts in their order; empty where it is not known.
        sources: What was read.
        shards: The pairs, in order.
        versions: Versions that made it.
        job: Hash of everything that the tokens depend on; empty where they do not come from text.
    """

    num_documents: int
    num_tokens: int
    num_empty: int
    num_errors: int
    errors: list[str]
    dtype: str
    tokenizer: TokenizerRecord | None
    text_digest: str
    sources: list[SourceRecord]
    shards: list[Shard]
    versions: dict[str, str]
    job: str


def manifest_path(prefix: Path) -> Path:
    """Return the path of the manifest of a pair or of a set of shards."""
    return prefix.with_name(prefix.name + ".manifest.json")


def write_manifest(prefix: Path, manifest: TokenManifest) -> None:
    """Write a manifest so that it is there completely or not at all."""
    write_json(manifest_path(prefix), asdict(manifest))


def read_manifest(prefix: Path) -> TokenManifest | None:
    """Return the manifest of a pair or of a set of shards; None if there is none.

    Raises:
        DataError: It cannot be read.
    """
    path = manifest_path(prefix)
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["tokenizer"] is not None:
            values["tokenizer"] = TokenizerRecord(**values["tokenizer"])
        values["sources"] = [SourceRecord(**source) for source in values["sources"]]
        values["shards"] = [Shard(**shard) for shard in values["shards"]]
        return TokenManifest(**values)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(
            path, found=f"no readable manifest ({error!r})", expected="what `prepare_data.py` wrote",
            fix="delete it to use the tokens without it, or make them again",
        ) from error  # fmt: skip


def shard_prefixes(prefix: Path) -> list[Path]:
    """Return the prefixes of the pairs that ``prefix`` names: the pair itself, or the shards of its manifest.

    Raises:
        DataError: There is neither.
    """
    manifest = read_manifest(prefix)
    if manifest is not None:
        return [prefix.with_name(shard.name) for shard in manifest.shards]
    if not prefix.with_name(prefix.name + ".idx").is_file():
        raise DataError(
            prefix, found="neither PREFIX.idx nor PREFIX.manifest.json", expected="a pair or a set of shards",
            fix="give the path without .bin, .idx or .manifest.json",
        )  # fmt: skip
    return [prefix]


def describe_pair(prefix: Path, *, num_documents: int, num_tokens: int) -> Shard:
    """Return the manifest's entry for a finished pair."""
    digests = [file_digest(prefix.with_name(prefix.name + ending)) for ending in (".bin", ".idx")]
    return Shard(
        name=prefix.name,
        num_documents=num_documents,
        num_tokens=num_tokens,
        bin_digest=digests[0],
        idx_digest=digests[1],
    )


def file_digest(path: Path) -> str:
    """Return a hash of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def text_digest(text: str) -> str:
    """Return a hash of a text, the same kind as ``file_digest``."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
