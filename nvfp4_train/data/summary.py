"""Look into a pair: its numbers, and any document as text."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nvfp4_train.data.encoders.base import Encoder
from nvfp4_train.data.error import DataError
from nvfp4_train.data.indexed import IndexedTokens
from nvfp4_train.data.manifest import TokenManifest, shard_prefixes

_CHUNK_TOKENS = 1 << 22


@dataclass(frozen=True, kw_only=True)
class PairSummary:
    """The numbers of a pair.

    Args:
        prefix: Which pair.
        dtype: dtype of a token.
        has_modes: Whether sequences carry modes.
        num_documents: Documents, empty ones included.
        num_empty: Empty ones.
        num_sequences: Sequences.
        num_tokens: Tokens.
        num_bytes: Bytes of both files.
        document_tokens: Tokens of the shortest, the median and the longest document; None without documents.
        token_range: Smallest and largest token id; None without tokens.
    """

    prefix: Path
    dtype: str
    has_modes: bool
    num_documents: int
    num_empty: int
    num_sequences: int
    num_tokens: int
    num_bytes: int
    document_tokens: tuple[int, int, int] | None
    token_range: tuple[int, int] | None

    def lines(self) -> list[str]:
        """Return the numbers as lines of text."""
        lines = [
            f"{self.prefix}",
            f"    tokens:    {self.num_tokens:,} of {self.dtype}, {self.num_bytes:,} bytes with the index",
            f"    documents: {self.num_documents:,} in {self.num_sequences:,} sequences"
            + (" with modes" if self.has_modes else "")
            + (f", {self.num_empty:,} of them empty" if self.num_empty else ""),
        ]
        if self.document_tokens is not None:
            least, median, most = self.document_tokens
            mean = self.num_tokens / self.num_documents
            lines.append(f"    tokens a document: {least:,} to {most:,}, median {median:,}, mean {mean:,.1f}")
        if self.token_range is not None:
            lines.append(f"    token ids: {self.token_range[0]:,} to {self.token_range[1]:,}")
        return lines


def summarize(prefix: Path) -> PairSummary:
    """Read a pair through and return its numbers.

    Raises:
        DataError: The pair is damaged.
    """
    pair = IndexedTokens(prefix)
    sizes = np.diff(pair.document_starts())
    return PairSummary(
        prefix=prefix,
        dtype=pair.dtype.name,
        has_modes=pair.modes is not None,
        num_documents=pair.num_documents,
        num_empty=int(np.count_nonzero(sizes == 0)),
        num_sequences=pair.num_sequences,
        num_tokens=pair.num_tokens,
        num_bytes=pair.data_path.stat().st_size + pair.index_path.stat().st_size,
        document_tokens=(int(sizes.min()), int(np.median(sizes)), int(sizes.max())) if len(sizes) else None,
        token_range=token_range(pair),
    )


def token_range(pair: IndexedTokens) -> tuple[int, int] | None:
    """Return the smallest and the largest value in a pair; None without tokens."""
    ranges = [
        (piece.min(), piece.max())
        for piece in (pair.read(first, _CHUNK_TOKENS) for first in range(0, pair.num_tokens, _CHUNK_TOKENS))
    ]
    return (int(min(low for low, _ in ranges)), int(max(high for _, high in ranges))) if ranges else None


def manifest_lines(manifest: TokenManifest) -> list[str]:
    """Return what a manifest says beyond the pairs' own numbers, as lines of text."""
    lines = [f"    made from: {len(manifest.sources):,} files or datasets, text {manifest.text_digest or 'unknown'}"]
    tokenizer = manifest.tokenizer
    if tokenizer is not None:
        lines.append(
            f"    tokenizer: {tokenizer.name}, {tokenizer.vocab_size:,} ids, hash {tokenizer.digest}, "
            f"end of document {tokenizer.end_of_document}"
        )
    lines.append(f"    left out:  {manifest.num_empty:,} empty records, {manifest.num_errors:,} bad ones")
    return lines + [f"        {error}" for error in manifest.errors]


def document_lines(prefix: Path, index: int, encoder: Encoder | None) -> list[str]:
    """Return a document, counted over all shards, as lines: its ids, and its text where there is a tokenizer.

    Raises:
        DataError: There is no such document, or an id is outside the tokenizer's vocabulary.
    """
    shards = [IndexedTokens(shard) for shard in shard_prefixes(prefix)]
    total = sum(shard.num_documents for shard in shards)
    if not 0 <= index < total:
        raise DataError(prefix, found=f"{total} documents", expected=f"a document {index}", fix="count from 0")
    place = index
    for shard in shards:
        if place < shard.num_documents:
            ids = shard.document(place).tolist()
            break
        place -= shard.num_documents
    lines = [f"document {index}: {len(ids):,} tokens", str(ids)]
    if encoder is not None:
        if ids and max(ids) >= encoder.vocab_size:
            raise DataError(
                prefix, found=f"token id {max(ids)} in document {index}",
                expected=f"ids below {encoder.vocab_size} of {encoder.name}", fix="use the tokenizer that made it",
            )  # fmt: skip
        lines.append(encoder.decode(ids))
    return lines
