"""From a corpus to tokens on disk: a tokenizer, two ``.bin/.idx`` pairs and a manifest, made once and cached."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from nvfp4_train import __version__
from nvfp4_train.config.data import TextDataConfig
from nvfp4_train.config.hub_data import HubDataConfig
from nvfp4_train.data.cache import cached_folder
from nvfp4_train.data.corpus import CorpusFile, Document, corpus_files, corpus_fingerprint, read_documents
from nvfp4_train.data.error import DataError
from nvfp4_train.data.hub_corpus import prepare_hub
from nvfp4_train.data.indexed import token_dtype
from nvfp4_train.data.indexed_writer import IndexedWriter
from nvfp4_train.data.manifest import file_digest
from nvfp4_train.data.prepared import MANIFEST, TOKENIZER, Manifest, PreparedData, write_prepared
from nvfp4_train.data.progress import announce, show_progress
from nvfp4_train.data.split import Split, Survey, split_documents, survey_documents
from nvfp4_train.data.tokenizer import encode_documents, load_tokenizer, tokenizer_version, train_tokenizer

# Part of the cache key: raise it when the same text gives other files.
_PREPARATION_VERSION = 1


def prepare_data(cfg: TextDataConfig) -> PreparedData:
    """Prepare the corpus, or find it prepared.

    The cache key is a hash of the text and of the options that shape its tokens, so changed text is prepared again and
    the same text is not. Safe when several processes call it at once.

    Raises:
        DataError: The corpus or the cache folder cannot be used.
    """
    cache_dir = Path(os.path.expandvars(cfg.cache_dir)).expanduser()
    if isinstance(cfg, HubDataConfig):
        folder = prepare_hub(cfg, cache_dir)
        return PreparedData(folder=folder, manifest=_read_manifest(folder))
    files = corpus_files(cfg)
    source = corpus_fingerprint(files)
    folder = cached_folder(cache_dir, key=_cache_key(cfg, source), make=lambda path: _prepare(path, cfg, files, source))
    return PreparedData(folder=folder, manifest=_read_manifest(folder))


def _read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    try:
        return Manifest(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(
            path,
            found=f"no readable manifest ({error})",
            expected="the manifest of a prepared folder",
            fix=f"delete {folder} and start again",
        ) from error


def _cache_key(cfg: TextDataConfig, source: str) -> str:
    parts = {
        "preparation": _PREPARATION_VERSION,
        "source": source,
        "validation_fraction": cfg.validation_fraction,
        "tokenizer_vocab_size": cfg.tokenizer_vocab_size,
        "tokenizers": tokenizer_version(),
    }
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def _prepare(folder: Path, cfg: TextDataConfig, files: list[CorpusFile], source: str) -> None:
    survey = _survey(cfg, files)
    size = f"{survey.num_characters / 1e6:.1f} M characters"
    announce(f"{len(files):,} files, {survey.num_documents:,} documents, {size}")
    with show_progress("training the tokenizer", total=1) as advance:
        training = (document for split, document in _split(cfg, files, survey) if split is Split.train)
        train_tokenizer(training, vocab_size=cfg.tokenizer_vocab_size).save(str(folder / TOKENIZER))
        advance(1)
    vocab_size = load_tokenizer(folder / TOKENIZER).get_vocab_size()
    writers = _write_tokens(folder, cfg, files, survey)
    if corpus_fingerprint(files) != source:
        raise DataError(
            files[0].path.parent, found="text files that changed while they were read", expected="files at rest",
            fix="start again when nothing writes to them",
        )  # fmt: skip
    digests = {path.name: file_digest(path) for path in sorted(folder.iterdir())}
    manifest = Manifest(
        fingerprint=hashlib.blake2b(json.dumps(digests, sort_keys=True).encode(), digest_size=16).hexdigest(),
        source_fingerprint=source,
        num_files=len(files),
        num_documents={split.value: writer.num_documents for split, writer in writers.items()},
        num_tokens={split.value: writer.num_tokens for split, writer in writers.items()},
        split_method=survey.method.value,
        vocab_size=vocab_size,
        dtype=token_dtype(vocab_size).name,
        file_digests=digests,
        versions={"nvfp4_train": __version__, "tokenizers": tokenizer_version()},
    )
    write_prepared(folder / MANIFEST, manifest)
    counts = ", ".join(f"{count:,} {split} tokens" for split, count in manifest.num_tokens.items())
    announce(f"prepared {counts}; kept for later runs in {folder.parent}")


def _survey(cfg: TextDataConfig, files: list[CorpusFile]) -> Survey:
    survey = survey_documents(read_documents(files), validation_fraction=cfg.validation_fraction)
    if survey.num_documents == 0:
        raise DataError(
            files[0].path, found=f"no text in {len(files)} files", expected="at least one document that is not empty",
            fix="check data.paths",
        )  # fmt: skip
    return survey


def _split(cfg: TextDataConfig, files: list[CorpusFile], survey: Survey) -> Iterator[tuple[Split, Document]]:
    return split_documents(read_documents(files), method=survey.method, validation_fraction=cfg.validation_fraction)


def _write_tokens(
    folder: Path, cfg: TextDataConfig, files: list[CorpusFile], survey: Survey
) -> dict[Split, IndexedWriter]:
    tokenizer = load_tokenizer(folder / TOKENIZER)
    dtype = token_dtype(tokenizer.get_vocab_size())
    documents = _split(cfg, files, survey)
    with ExitStack() as stack:
        writers = {split: stack.enter_context(IndexedWriter(folder / split.value, dtype=dtype)) for split in Split}
        advance = stack.enter_context(show_progress("tokenizing", total=survey.num_characters))
        for split, tokens in encode_documents(documents, tokenizer=tokenizer, dtype=dtype, advance=advance):
            writers[split].add_document(tokens)
    return writers
