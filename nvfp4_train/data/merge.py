"""Put pairs together, byte for byte as Megatron's tool does."""

from pathlib import Path

import numpy as np

from nvfp4_train import __version__
from nvfp4_train.data.error import DataError
from nvfp4_train.data.indexed import IndexedTokens
from nvfp4_train.data.indexed_writer import IndexedWriter
from nvfp4_train.data.manifest import (
    TokenizerRecord,
    TokenManifest,
    describe_pair,
    read_manifest,
    shard_prefixes,
    write_manifest,
)
from nvfp4_train.data.progress import show_progress


def merge_pairs(inputs: list[Path], output: Path) -> TokenManifest:
    """Write all documents of the inputs into one pair, in order.

    Args:
        inputs: Prefixes of pairs, or of sets of shards.
        output: Prefix of the new pair.

    Raises:
        DataError: An input is damaged, the inputs differ in dtype, tokenizer or modes, or the output exists.
    """
    require_free(output)
    manifests = [read_manifest(prefix) for prefix in inputs]
    tokenizer = _same_tokenizer(inputs, manifests)
    prefixes = [shard for prefix in inputs for shard in shard_prefixes(prefix)]
    first = IndexedTokens(prefixes[0])
    has_modes = first.modes is not None
    _check_dtypes(prefixes, first.dtype)
    with (
        IndexedWriter(output, dtype=first.dtype, has_modes=has_modes) as writer,
        show_progress("merging", total=len(prefixes)) as advance,
    ):
        for prefix in prefixes:
            writer.append(prefix)
            advance(1)
    known = [manifest for manifest in manifests if manifest is not None]
    manifest = TokenManifest(
        num_documents=writer.num_documents,
        num_tokens=writer.num_tokens,
        num_empty=sum(part.num_empty for part in known),
        num_errors=sum(part.num_errors for part in known),
        errors=[error for part in known for error in part.errors],
        dtype=first.dtype.name,
        tokenizer=tokenizer,
        text_digest="",
        sources=[source for part in known for source in part.sources],
        shards=[describe_pair(output, num_documents=writer.num_documents, num_tokens=writer.num_tokens)],
        versions={"nvfp4_train": __version__},
        job="",
    )
    write_manifest(output, manifest)
    return manifest


def require_free(output: Path) -> None:
    """Make sure that a pair can be written.

    Raises:
        DataError: There is one already, or the folder cannot be made.
    """
    for ending in (".bin", ".idx"):
        path = output.with_name(output.name + ending)
        if path.exists():
            raise DataError(
                path, found="a file", expected="no file of that name", fix="choose another output, or delete it"
            )
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            output.parent, found=str(error), expected="a folder that can be written", fix="choose another output"
        ) from error


def _same_tokenizer(inputs: list[Path], manifests: list[TokenManifest | None]) -> TokenizerRecord | None:
    """Return the tokenizer of all inputs; None if one does not say."""
    records = [manifest.tokenizer if manifest is not None else None for manifest in manifests]
    known = [(prefix, record) for prefix, record in zip(inputs, records, strict=True) if record is not None]
    for prefix, record in known:
        reference = known[0][1]
        if (record.digest, record.end_of_document) != (reference.digest, reference.end_of_document):
            raise DataError(
                prefix,
                found=f"tokens of {record.name} ({record.digest}, end of document {record.end_of_document})",
                expected=f"{reference.name} ({reference.digest}, end of document {reference.end_of_document}), "
                f"as in {known[0][0]}",
                fix="tokenize both with the same tokenizer",
            )
    return known[0][1] if len(known) == len(inputs) else None


def _check_dtypes(prefixes: list[Path], dtype: np.dtype) -> None:
    """Find a dtype that differs before anything is copied."""
    for prefix in prefixes:
        pair = IndexedTokens(prefix)
        if pair.dtype != dtype:
            raise DataError(
                pair.index_path, found=f"tokens of {pair.dtype.name}",
                expected=f"{dtype.name}, as in {prefixes[0]}", fix="tokenize both with the same tokenizer and dtype",
            )  # fmt: skip
