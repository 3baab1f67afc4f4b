"""Check tokenized files completely: format, hashes, token ids, ends of documents."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nvfp4_train.data.error import DataError
from nvfp4_train.data.indexed import IndexedTokens
from nvfp4_train.data.manifest import Shard, TokenManifest, file_digest, read_manifest, shard_prefixes

_CHUNK_TOKENS = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What was found to be right.

    Args:
        num_tokens: Tokens read.
        num_documents: Documents read.
        checks: What was checked.
    """

    num_tokens: int
    num_documents: int
    checks: list[str]


def verify_tokens(prefix: Path, *, vocab_size: int | None = None) -> Verified:
    """Read a pair or a set of shards through.

    The manifest's counts, hashes, vocabulary and end-of-document token are checked where there is a manifest.

    Args:
        prefix: Pair, or set of shards.
        vocab_size: Ids lie below it; None for what the manifest says.

    Raises:
        DataError: Something is wrong.
    """
    manifest = read_manifest(prefix)
    tokenizer = manifest.tokenizer if manifest is not None else None
    limit = vocab_size if vocab_size is not None else (tokenizer.vocab_size if tokenizer is not None else None)
    end = tokenizer.end_of_document if tokenizer is not None else None
    shards = manifest.shards if manifest is not None else []
    expected = {shard.name: shard for shard in shards}
    num_tokens = num_documents = 0
    for path in shard_prefixes(prefix):
        pair = IndexedTokens(path)
        if path.name in expected:
            _check_shard(pair, expected[path.name])
        _check_ids(pair, limit)
        if end is not None:
            _check_ends(pair, end)
        num_tokens += pair.num_tokens
        num_documents += pair.num_documents
    _check_counts(prefix, manifest, num_tokens, num_documents)
    checks = ["index and sizes"]
    checks += ["counts and hashes of the manifest"] if manifest is not None else []
    checks += [f"token ids below {limit}"] if limit is not None else ["token ids not negative"]
    checks += [f"each document ends with {end}"] if end is not None else []
    return Verified(num_tokens=num_tokens, num_documents=num_documents, checks=checks)


def _check_counts(prefix: Path, manifest: TokenManifest | None, num_tokens: int, num_documents: int) -> None:
    if manifest is None or (manifest.num_tokens, manifest.num_documents) == (num_tokens, num_documents):
        return
    raise DataError(
        prefix, found=f"{num_tokens} tokens in {num_documents} documents",
        expected=f"{manifest.num_tokens} in {manifest.num_documents}, as the manifest says",
        fix="copy the files again from where they were made",
    )  # fmt: skip


def _check_shard(pair: IndexedTokens, shard: Shard) -> None:
    for path, digest in ((pair.index_path, shard.idx_digest), (pair.data_path, shard.bin_digest)):
        found = file_digest(path)
        if found != digest:
            raise DataError(
                path, found=f"content with hash {found}", expected=f"{digest}, as the manifest says",
                fix="copy the file again from where it was made",
            )  # fmt: skip


def _check_ids(pair: IndexedTokens, limit: int | None) -> None:
    if pair.dtype.kind == "f":
        raise DataError(
            pair.data_path, found=f"{pair.dtype.name} values", expected="integer token ids", fix="use text data"
        )
    for first in range(0, pair.num_tokens, _CHUNK_TOKENS):
        tokens = pair.read(first, _CHUNK_TOKENS)
        wrong = tokens < 0 if limit is None else (tokens < 0) | (tokens >= limit)
        if wrong.any():
            where = first + int(np.argmax(wrong))
            document = int(np.searchsorted(pair.document_starts(), where, side="right")) - 1
            raise DataError(
                pair.data_path,
                found=f"token id {pair.tokens[where]} at token {where}, in document {document}",
                expected="ids of 0 or more" if limit is None else f"ids from 0 to {limit - 1}",
                fix="name the tokenizer that made the data, or tokenize again",
            )


def _check_ends(pair: IndexedTokens, end: int) -> None:
    starts = pair.document_starts()
    filled = np.flatnonzero(np.diff(starts))
    wrong = pair.tokens[starts[filled + 1] - 1] != end
    if wrong.any():
        document = int(filled[np.argmax(wrong)])
        raise DataError(
            pair.data_path, found=f"document {document} that ends with {pair.document(document)[-1]}",
            expected=f"the end-of-document token {end}", fix="tokenize again",
        )  # fmt: skip
