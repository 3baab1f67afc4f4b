"""Divide a pair: into shards of a size or a number, or into named shares."""

import hashlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np

from nvfp4_train.data.error import DataError
from nvfp4_train.data.indexed import IndexedTokens
from nvfp4_train.data.indexed_writer import IndexedWriter
from nvfp4_train.data.manifest import Shard, TokenManifest, describe_pair, read_manifest, write_manifest
from nvfp4_train.data.merge import require_free
from nvfp4_train.data.progress import show_progress

_BLOCK = 1 << 16  # documents that are copied together


def divide_by_size(prefix: Path, output: Path, *, shard_tokens: int) -> list[Path]:
    """Write a pair as shards in file order; merging them gives the pair again.

    Args:
        prefix: Pair to divide.
        output: Shards are ``OUTPUT_00000`` and so on.
        shard_tokens: A shard ends with the document that brings this many tokens.

    Raises:
        DataError: The pair is damaged, or a shard exists.
    """
    pair = IndexedTokens(prefix)
    ends = pair.document_starts()[1:]
    cuts = [0]
    while cuts[-1] < pair.num_documents:
        start = int(ends[cuts[-1] - 1]) if cuts[-1] else 0
        cuts.append(min(pair.num_documents, 1 + int(np.searchsorted(ends, start + shard_tokens))))
    return _write_ranges(pair, output, cuts)


def divide_by_count(prefix: Path, output: Path, *, num_shards: int) -> list[Path]:
    """Write a pair as a number of shards of about the same size, in file order.

    Raises:
        DataError: The pair is damaged or has fewer documents than that, or a shard exists.
    """
    pair = IndexedTokens(prefix)
    if pair.num_documents < num_shards:
        raise DataError(
            prefix, found=f"{pair.num_documents} documents", expected=f"at least {num_shards}, one a shard",
            fix="ask for fewer shards",
        )  # fmt: skip
    targets = np.arange(1, num_shards) * pair.num_tokens // num_shards
    cuts = np.searchsorted(pair.document_starts(), targets).tolist()
    # Each shard gets a document, however long its neighbours are.
    for index in range(num_shards - 1):
        cuts[index] = min(max(cuts[index], index + 1), pair.num_documents - (num_shards - 1 - index))
        if index:
            cuts[index] = max(cuts[index], cuts[index - 1] + 1)
    return _write_ranges(pair, output, [0, *cuts, pair.num_documents])


def divide_by_share(prefix: Path, output: Path, *, shares: dict[str, float]) -> list[Path]:
    """Write each document to one of several pairs, chosen by a hash of its tokens.

    The same document is always on the same side, however often it occurs and in whichever pair, so a validation share
    holds no copy of a training document.

    Args:
        prefix: Pair to divide.
        output: Pairs are ``OUTPUT_NAME``.
        shares: Share of the documents by name; they add up to 1.

    Raises:
        DataError: The pair is damaged or has modes, the shares do not add up to 1, or an output exists.
    """
    pair = IndexedTokens(prefix)
    if any(not 0 < share < 1 for share in shares.values()) or abs(sum(shares.values()) - 1) > 1e-9:
        raise DataError(
            prefix, found=f"shares {shares}", expected="shares between 0 and 1 that add up to 1", fix="correct them"
        )
    limits = np.cumsum(list(shares.values()))[:-1].tolist()
    outputs = [output.with_name(f"{output.name}_{name}") for name in shares]
    with ExitStack() as stack:
        writers = [stack.enter_context(_writer(pair, path)) for path in outputs]
        advance = stack.enter_context(show_progress("dividing", total=pair.num_documents))
        for index, tokens in enumerate(pair.documents()):
            rank = int.from_bytes(hashlib.blake2b(tokens.tobytes(), digest_size=8).digest(), "little") / 2.0**64
            _copy_document(pair, index, writers[int(np.searchsorted(limits, rank, side="right"))])
            advance(1)
    _describe(pair, outputs, writers)
    return outputs


def _write_ranges(pair: IndexedTokens, output: Path, cuts: list[int]) -> list[Path]:
    outputs = [output.with_name(f"{output.name}_{index:05}") for index in range(len(cuts) - 1)]
    writers = []
    with show_progress("dividing", total=pair.num_documents) as advance:
        for path, first, last in zip(outputs, cuts[:-1], cuts[1:], strict=True):
            with _writer(pair, path) as writer:
                _copy_range(pair, writer, range(first, last), advance)
            writers.append(writer)
    manifest = _describe(pair, outputs, writers)
    if manifest is not None:
        shards = [shard for path in outputs for shard in _shards_of(path)]
        write_manifest(output, replace(manifest, shards=shards))
    return outputs


def _copy_range(pair: IndexedTokens, writer: IndexedWriter, documents: range, advance: Callable[[int], None]) -> None:
    if not pair.single_sequence or pair.modes is not None:
        for index in documents:
            _copy_document(pair, index, writer)
            advance(1)
        return
    for first in range(documents.start, documents.stop, _BLOCK):
        last = min(first + _BLOCK, documents.stop)
        starts = pair.document_starts_between(first, last + 1)
        writer.add_documents(pair.read(int(starts[0]), int(starts[-1] - starts[0])), np.diff(starts))
        advance(last - first)


def _copy_document(pair: IndexedTokens, index: int, writer: IndexedWriter) -> None:
    first, last = (int(edge) for edge in pair.document_indices[index : index + 2])
    for sequence in range(first, last):
        writer.add_sequence(pair.sequence(sequence), mode=int(pair.modes[sequence]) if pair.modes is not None else 0)
    writer.end_document()


def _writer(pair: IndexedTokens, output: Path) -> IndexedWriter:
    require_free(output)
    return IndexedWriter(output, dtype=pair.dtype, has_modes=pair.modes is not None)


def _describe(pair: IndexedTokens, outputs: list[Path], writers: list[IndexedWriter]) -> TokenManifest | None:
    """Write the manifest of each output; return that of the pair, None if it has none."""
    manifest = read_manifest(pair.prefix)
    if manifest is None:
        return None
    for path, writer in zip(outputs, writers, strict=True):
        shard = describe_pair(path, num_documents=writer.num_documents, num_tokens=writer.num_tokens)
        part = replace(manifest, shards=[shard], text_digest="", job="")
        write_manifest(path, replace(part, num_documents=writer.num_documents, num_tokens=writer.num_tokens))
    return manifest


def _shards_of(prefix: Path) -> list[Shard]:
    manifest = read_manifest(prefix)
    assert manifest is not None
    return manifest.shards
