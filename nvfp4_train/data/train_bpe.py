"""Train a tokenizer on any source."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nvfp4_train.data.corpus import Document
from nvfp4_train.data.error import DataError
from nvfp4_train.data.progress import announce
from nvfp4_train.data.sources.open import SourceSpec, open_source
from nvfp4_train.data.sources.record import Source, parse_batch
from nvfp4_train.data.staging import Staging
from nvfp4_train.data.tokenizer import train_tokenizer
from nvfp4_train.data.tokenizing.job import OnError

_LEAST_ENTRIES = 260  # 256 bytes and the special tokens


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """What to train on and how.

    Args:
        source: What to read.
        output: ``tokenizer.json`` to write.
        vocab_size: Entries at most.
        sample_characters: Text to train on; the documents' hashes choose it.
        on_error: What happens at a record that cannot be used.
    """

    source: SourceSpec
    output: Path
    vocab_size: int
    sample_characters: int
    on_error: OnError


def train_bpe(job: TrainJob, *, staging: Staging) -> None:
    """Train a byte-level BPE and write it.

    Raises:
        DataError: The source or the output cannot be used, or a record where ``on_error`` is ``stop``.
    """
    if job.vocab_size < _LEAST_ENTRIES:
        raise DataError(
            job.output, found=f"a vocabulary of {job.vocab_size}", expected=f"at least {_LEAST_ENTRIES} entries",
            fix="raise --vocab-size",
        )  # fmt: skip
    if job.output.exists():
        raise DataError(
            job.output, found="a file", expected="no file of that name", fix="choose another output, or delete it"
        )
    source = open_source(job.source, staging=staging)
    documents = _Documents(source, job.on_error)
    tokenizer = train_tokenizer(documents, vocab_size=job.vocab_size, sample_characters=job.sample_characters)
    if documents.count == 0:
        raise DataError(
            str(source.identity[0]["name"]), found=f"no document ({documents.num_errors} bad records)",
            expected="at least one document", fix="check the source",
        )  # fmt: skip
    job.output.parent.mkdir(parents=True, exist_ok=True)
    partial = job.output.with_name(job.output.name + ".partial")
    tokenizer.save(str(partial))
    partial.replace(job.output)
    entries = tokenizer.get_vocab_size()
    counts = f"{documents.count:,} documents; {documents.num_errors:,} records were bad"
    announce(f"{job.output}: {entries:,} entries from {counts}")


class _Documents:
    """The documents of a source, counted."""

    def __init__(self, source: Source, on_error: OnError) -> None:
        self.count = 0
        self.num_errors = 0
        self._source = source
        self._on_error = on_error

    def __iter__(self) -> Iterator[Document]:
        for batch in self._source.batches(None):
            parsed = parse_batch(batch)
            for error in parsed.errors:
                if self._on_error is OnError.stop:
                    raise DataError(
                        error.place, found=error.found, expected=error.expected,
                        fix="repair or delete the record, or say --on-error skip",
                    )  # fmt: skip
                self.num_errors += 1
                announce(f"skipped {error}")
            for text, digest in zip(parsed.texts, parsed.digests, strict=True):
                self.count += 1
                yield Document(text=text, digest=digest)
