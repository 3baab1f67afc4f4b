"""Tokenize a source: the same output for any number of workers, and after any kill."""

import hashlib
import json
import shutil
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from nvfp4_train import __version__
from nvfp4_train.data.encoders.base import Encoder
from nvfp4_train.data.encoders.load import EncoderSpec, load_encoder
from nvfp4_train.data.error import DataError
from nvfp4_train.data.indexed import token_dtype
from nvfp4_train.data.manifest import (
    Shard,
    TokenizerRecord,
    TokenManifest,
    file_digest,
    manifest_path,
    read_manifest,
    text_digest,
    write_manifest,
)
from nvfp4_train.data.progress import TokenMeter, announce
from nvfp4_train.data.sources.open import SourceSpec, open_source
from nvfp4_train.data.sources.record import RecordError, Source
from nvfp4_train.data.staging import Staging
from nvfp4_train.data.tokenizing.output import ShardedOutput
from nvfp4_train.data.tokenizing.state import JobState, forget_state, load_state, locked, remove_unused, save_state
from nvfp4_train.data.tokenizing.worker import EncodedBatch, WorkerPool, WorkerSpec

_KEPT_ERRORS = 100  # in the manifest; all are counted
_SHOWN_ERRORS = 10
_VERSION = 1  # raise it when the same job gives other files


class OnError(StrEnum):
    """What happens at a record that cannot be used."""

    skip = "skip"
    stop = "stop"


@dataclass(frozen=True, kw_only=True)
class TokenizeJob:
    """What to tokenize and how.

    Args:
        source: What to read.
        output: Prefix of the pair, or of the names of the shards.
        encoder: Tokenizer.
        append_end: Whether each document ends with the end-of-document token.
        shard_tokens: Tokens that fill a shard; 0 for one pair.
        max_tokens: Stop with the document that brings this many; 0 to read everything.
        validation_fraction: Share of documents, chosen by the hash of their text, that goes to ``OUTPUT_validation``
            while the rest goes to ``OUTPUT_train``; 0 for no split.
        on_error: What happens at a record that cannot be used.
    """

    source: SourceSpec
    output: Path
    encoder: EncoderSpec
    append_end: bool = True
    shard_tokens: int = 0
    max_tokens: int = 0
    validation_fraction: float = 0.0
    on_error: OnError = OnError.stop

    def part_names(self) -> list[str]:
        """Return the names of the parts: the output's, or those of training and validation."""
        name = self.output.name
        return [f"{name}_train", f"{name}_validation"] if self.validation_fraction else [name]


@dataclass(frozen=True, kw_only=True)
class TokenizeResources:
    """What a job may use; nothing of it shapes the output.

    Args:
        num_workers: Processes that encode.
        checkpoint_seconds: Time between two saved states.
        staging: Where files from object stores go.
    """

    num_workers: int
    checkpoint_seconds: float
    staging: Staging


def tokenize(job: TokenizeJob, resources: TokenizeResources) -> dict[str, TokenManifest]:
    """Tokenize, or go on where a killed process stopped, or find everything done.

    Returns:
        The manifest of each part, by its name.

    Raises:
        DataError: The source, the tokenizer or the output cannot be used, or a record where ``on_error`` is ``stop``.
    """
    encoder = load_encoder(job.encoder)
    if job.append_end and encoder.end_of_document is None:
        raise DataError(
            encoder.name, found="no end-of-document token", expected="one to append to each document",
            fix="name it with --eod-token, or say --no-append-eod",
        )  # fmt: skip
    source = open_source(job.source, staging=resources.staging)
    identity = _identity(job, source, encoder)
    done = _finished(job, identity)
    if done is not None:
        announce(f"{job.output} is complete already")
        return done
    folder = job.output.with_name(job.output.name + ".partial")
    with locked(folder):
        state = load_state(folder, identity)
        if not state.is_complete:
            try:
                state = _Run(job, resources, source=source, encoder=encoder, folder=folder).run()
            finally:
                remove_unused(folder)
        manifests = _manifests(job, state, encoder, source)
        for name, manifest in manifests.items():
            _put_in_place(folder, manifest.shards)
            write_manifest(job.output.with_name(name), manifest)
        shutil.rmtree(folder)
    return manifests


class _Run:
    """One process's share of a job: from the state it finds to the end."""

    def __init__(
        self, job: TokenizeJob, resources: TokenizeResources, *, source: Source, encoder: Encoder, folder: Path
    ) -> None:
        self._job, self._resources, self._source, self._folder = job, resources, source, folder
        state = self._state = load_state(folder, _identity(job, source, encoder))
        dtype = token_dtype(encoder.vocab_size)
        self._worker = WorkerSpec(encoder=job.encoder, dtype=dtype.str, append_end=job.append_end)
        self._output = ShardedOutput(
            folder, names=job.part_names(), dtype=dtype, shard_tokens=job.shard_tokens, state=state.output
        )
        self._saved_at = time.monotonic()
        self._is_consistent = True  # state and output agree: no batch is half written

    def run(self) -> JobState:
        """Encode what is left and return the state, marked complete.

        Raises:
            DataError: A record cannot be used and the job says ``stop``, or there is no document at all.
        """
        if self._state.cursor is not None:
            announce(f"going on after {self._output.num_documents:,} documents, {self._output.num_tokens:,} tokens")
        try:
            with (
                WorkerPool(self._worker, num_workers=self._resources.num_workers) as pool,
                TokenMeter("tokenizing", done=self._output.num_tokens).shown() as meter,
            ):
                for batch in pool.encode(self._source.batches(self._state.cursor)):
                    if self._is_full():
                        break
                    self._take(batch, meter)
        except BaseException as error:
            if self._state.cursor is not None and self._is_consistent:
                self._save()  # Ctrl-C and a bad record lose nothing
            self._output.abandon(error)
            raise
        self._require_documents()
        shards = self._output.finish()
        self._state.output = {name: [asdict(shard) for shard in part] for name, part in shards.items()}
        self._state.is_complete = True
        save_state(self._folder, self._state)
        return self._state

    def _is_full(self) -> bool:
        return 0 < self._job.max_tokens <= self._output.num_tokens

    def _take(self, batch: EncodedBatch, meter: TokenMeter) -> None:
        self._stop_at_error(batch)
        self._is_consistent = False
        for error in batch.errors:
            self._report(error)
        tokens, lengths, digests = self._limited(batch)
        for digest in digests:
            self._state.text_digest = hashlib.blake2b(
                bytes.fromhex(self._state.text_digest) + digest, digest_size=16
            ).hexdigest()
        self._write(tokens, lengths, digests)
        self._state.cursor = batch.cursor
        self._state.num_empty += batch.num_empty
        self._is_consistent = True
        meter.advance(self._share_done(batch), len(tokens))
        if time.monotonic() - self._saved_at >= self._resources.checkpoint_seconds:
            self._save()

    def _share_done(self, batch: EncodedBatch) -> float | None:
        if self._job.max_tokens:
            return max(batch.fraction or 0.0, min(1.0, self._output.num_tokens / self._job.max_tokens))
        return batch.fraction

    def _limited(self, batch: EncodedBatch) -> tuple[np.ndarray, np.ndarray, list[bytes]]:
        """Return the documents of a batch up to the one that reaches ``max_tokens``."""
        count = len(batch.lengths)
        if self._job.max_tokens:
            ends = self._output.num_tokens + np.cumsum(batch.lengths)
            count = min(count, 1 + int(np.searchsorted(ends, self._job.max_tokens)))
        lengths = batch.lengths[:count]
        return batch.tokens[: int(lengths.sum())], lengths, batch.digests[:count]

    def _write(self, tokens: np.ndarray, lengths: np.ndarray, digests: list[bytes]) -> None:
        names = self._job.part_names()
        if len(names) == 1:
            self._output.add(names[0], tokens, lengths)
            return
        ranks = np.frombuffer(b"".join(digests), dtype="<u8")[::2]
        validates = ranks < self._job.validation_fraction * 2.0**64
        for name, chosen in zip(names, (~validates, validates), strict=True):
            self._output.add(name, tokens[np.repeat(chosen, lengths)], lengths[chosen])

    def _stop_at_error(self, batch: EncodedBatch) -> None:
        if batch.errors and self._job.on_error is OnError.stop:
            error = batch.errors[0]
            raise DataError(
                error.place, found=error.found, expected=error.expected,
                fix="repair or delete the record, or say --on-error skip",
            )  # fmt: skip

    def _report(self, error: RecordError) -> None:
        self._state.num_errors += 1
        if len(self._state.errors) < _KEPT_ERRORS:
            self._state.errors.append(str(error))
        if self._state.num_errors <= _SHOWN_ERRORS:
            announce(f"skipped {error}")

    def _require_documents(self) -> None:
        if self._output.num_documents == 0:
            forget_state(self._folder)
            names = [str(entry["name"]) for entry in self._source.identity]
            raise DataError(
                names[0], found=f"no document in {len(names)} files ({self._state.num_errors} bad records, "
                f"{self._state.num_empty} empty ones)", expected="at least one document", fix="check the source",
            )  # fmt: skip

    def _save(self) -> None:
        self._state.output = self._output.checkpoint()
        save_state(self._folder, self._state)
        self._saved_at = time.monotonic()


def _identity(job: TokenizeJob, source: Source, encoder: Encoder) -> dict[str, Any]:
    return {
        "version": _VERSION,
        "source": source.identity,
        "tokenizer": encoder.digest,
        "end_of_document": encoder.end_of_document if job.append_end else None,
        "shard_tokens": job.shard_tokens,
        "max_tokens": job.max_tokens,
        "validation_fraction": job.validation_fraction,
    }


def _job_digest(identity: dict[str, Any]) -> str:
    return text_digest(json.dumps(identity, sort_keys=True))


def _finished(job: TokenizeJob, identity: dict[str, Any]) -> dict[str, TokenManifest] | None:
    """Return the manifests if the job is done, None if nothing is in its way.

    Raises:
        DataError: Other files have the names that it would write.
    """
    found = {}
    for name in job.part_names():
        prefix = job.output.with_name(name)
        manifest = read_manifest(prefix)
        if manifest is None and not prefix.with_name(f"{name}.idx").is_file():
            continue
        if manifest is None or manifest.job != _job_digest(identity):
            raise DataError(
                manifest_path(prefix) if manifest else prefix.with_name(f"{name}.idx"),
                found="tokens of another job", expected="no file of that name",
                fix="choose another output, or delete these files",
            )  # fmt: skip
        found[name] = manifest
    return found if len(found) == len(job.part_names()) else None


def _manifests(job: TokenizeJob, state: JobState, encoder: Encoder, source: Source) -> dict[str, TokenManifest]:
    assert state.output is not None
    assert state.cursor is not None
    sources = source.describe(state.cursor)
    if open_source(job.source, staging=Staging(Path(), max_bytes=0)).identity != source.identity:
        raise DataError(
            sources[0].name, found="a source that changed while it was read", expected="files at rest",
            fix=f"delete {job.output}.partial and start over when nothing writes to them",
        )  # fmt: skip
    manifests = {}
    for name, saved in state.output.items():
        shards = [Shard(**shard) for shard in saved]
        manifests[name] = TokenManifest(
            num_documents=sum(shard.num_documents for shard in shards),
            num_tokens=sum(shard.num_tokens for shard in shards),
            num_empty=state.num_empty,
            num_errors=state.num_errors,
            errors=state.errors,
            dtype=token_dtype(encoder.vocab_size).name,
            tokenizer=TokenizerRecord(
                name=encoder.name,
                digest=encoder.digest,
                vocab_size=encoder.vocab_size,
                end_of_document=state.job["end_of_document"],
            ),
            text_digest=state.text_digest,
            sources=sources,
            shards=shards,
            versions={"nvfp4_train": __version__, "tokenizer": encoder.library},
            job=_job_digest(state.job),
        )
    return manifests


def _put_in_place(folder: Path, shards: list[Shard]) -> None:
    """Move finished pairs out of the work folder; those that an earlier start moved are there already."""
    for shard in shards:
        for ending, digest in ((".bin", shard.bin_digest), (".idx", shard.idx_digest)):
            source, target = folder / (shard.name + ending), folder.parent / (shard.name + ending)
            if source.is_file():
                source.replace(target)
            elif not target.is_file() or file_digest(target) != digest:
                raise DataError(
                    source, found="no file", expected="a finished shard", fix=f"delete {folder} and start over"
                )
