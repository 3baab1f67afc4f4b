"""From a dataset of the hub to a prepared folder: a tokenizer, shards and a manifest, made once and resumable."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from nvfp4_train import __version__
from nvfp4_train.config.hub_data import HubDataConfig
from nvfp4_train.data.cache import Leftovers, cached_folder
from nvfp4_train.data.corpus import Document
from nvfp4_train.data.encoders.hugging_face import HuggingFaceEncoder
from nvfp4_train.data.encoders.load import EncoderSpec, load_encoder
from nvfp4_train.data.error import DataError
from nvfp4_train.data.manifest import TokenManifest, file_digest
from nvfp4_train.data.prepared import MANIFEST, SHARDS, TOKENIZER, Manifest, write_prepared
from nvfp4_train.data.progress import announce
from nvfp4_train.data.sources.hub import HubDataset, HubSource, dataset_version
from nvfp4_train.data.sources.open import SourceSpec
from nvfp4_train.data.sources.record import parse_batch
from nvfp4_train.data.split import Split, SplitMethod
from nvfp4_train.data.staging import Staging
from nvfp4_train.data.tokenizer import tokenizer_version, train_tokenizer
from nvfp4_train.data.tokenizing.job import OnError, TokenizeJob, TokenizeResources, tokenize

_PREPARATION_VERSION = 1
_CHECKPOINT_SECONDS = 60.0


def prepare_hub(cfg: HubDataConfig, cache_dir: Path) -> Path:
    """Tokenize the dataset, or find it tokenized, and return the folder.

    Once prepared, no network is needed. A killed preparation goes on where it was.

    Raises:
        DataError: The dataset, the tokenizer or the cache folder cannot be used.
    """
    return cached_folder(
        cache_dir, key=_cache_key(cfg), make=lambda folder: _prepare(folder, cfg), leftovers=Leftovers.resume
    )


def _cache_key(cfg: HubDataConfig) -> str:
    tokenizer = _user_tokenizer(cfg)
    parts = {
        "preparation": _PREPARATION_VERSION,
        "dataset": cfg.dataset,
        # A folder that changed is prepared again; the hub is not asked, so that a prepared run needs no network.
        "folder": dataset_version(_dataset(cfg)) if Path(cfg.dataset).expanduser().is_dir() else "",
        "subset": cfg.subset,
        "split": cfg.split,
        "revision": cfg.revision,
        "column": cfg.column,
        "tokenizer": tokenizer.digest
        if tokenizer is not None
        else [cfg.tokenizer_vocab_size, cfg.tokenizer_characters],
        "tokenizers": tokenizer_version(),
        "max_tokens": cfg.max_tokens,
        "shard_tokens": cfg.shard_tokens,
        "validation_fraction": cfg.validation_fraction,
    }
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def _prepare(folder: Path, cfg: HubDataConfig) -> None:
    path = folder / TOKENIZER
    if not path.is_file():
        _make_tokenizer(path, cfg)
    announce(f"tokenizing {cfg.dataset} into {folder.parent}")
    job = TokenizeJob(
        source=SourceSpec(dataset=_dataset(cfg), column=cfg.column),
        output=folder / SHARDS,
        encoder=EncoderSpec(name=str(path)),
        shard_tokens=cfg.shard_tokens,
        max_tokens=cfg.max_tokens,
        validation_fraction=cfg.validation_fraction,
        on_error=OnError.skip,
    )
    with Staging(folder, max_bytes=0) as staging:
        resources = TokenizeResources(
            num_workers=cfg.num_workers, checkpoint_seconds=_CHECKPOINT_SECONDS, staging=staging
        )
        parts = tokenize(job, resources)
    manifests = {split: parts[f"{SHARDS}_{split.value}"] for split in Split}
    for split, manifest in manifests.items():
        if manifest.num_documents == 0:
            raise DataError(
                cfg.dataset, found=f"no {split.value} document of {sum(m.num_documents for m in manifests.values())}",
                expected="some in each split", fix="change data.validation_fraction or data.max_tokens",
            )  # fmt: skip
    _write_manifest(folder, manifests)


def _write_manifest(folder: Path, manifests: dict[Split, TokenManifest]) -> None:
    train = manifests[Split.train]
    assert train.tokenizer is not None
    digests = {TOKENIZER: file_digest(folder / TOKENIZER)}
    for manifest in manifests.values():
        for shard in manifest.shards:
            digests |= {f"{shard.name}.bin": shard.bin_digest, f"{shard.name}.idx": shard.idx_digest}
    write_prepared(
        folder / MANIFEST,
        Manifest(
            fingerprint=hashlib.blake2b(json.dumps(digests, sort_keys=True).encode(), digest_size=16).hexdigest(),
            source_fingerprint=train.text_digest,
            num_files=len(train.sources),
            num_documents={split.value: manifest.num_documents for split, manifest in manifests.items()},
            num_tokens={split.value: manifest.num_tokens for split, manifest in manifests.items()},
            split_method=SplitMethod.by_document.value,
            vocab_size=train.tokenizer.vocab_size,
            dtype=train.dtype,
            file_digests=digests,
            versions={"nvfp4_train": __version__, "tokenizers": tokenizer_version()},
        ),
    )


def _make_tokenizer(path: Path, cfg: HubDataConfig) -> None:
    if cfg.tokenizer:
        given = Path(cfg.tokenizer).expanduser()
        shutil.copyfile(given / TOKENIZER if given.is_dir() else given, path)
        return
    announce(f"training the tokenizer on the beginning of {cfg.dataset}")
    tokenizer = train_tokenizer(
        _first_documents(cfg), vocab_size=cfg.tokenizer_vocab_size, sample_characters=cfg.tokenizer_characters
    )
    partial = path.with_name(path.name + ".partial")
    tokenizer.save(str(partial))
    partial.replace(path)


def _first_documents(cfg: HubDataConfig) -> Iterator[Document]:
    num_characters = 0
    for batch in HubSource(_dataset(cfg), column=cfg.column).batches(None):
        parsed = parse_batch(batch)
        for text, digest in zip(parsed.texts, parsed.digests, strict=True):
            yield Document(text=text, digest=digest)
            num_characters += len(text)
            if num_characters >= cfg.tokenizer_characters:
                return


def _user_tokenizer(cfg: HubDataConfig) -> HuggingFaceEncoder | None:
    if not cfg.tokenizer:
        return None
    encoder = load_encoder(EncoderSpec(name=cfg.tokenizer))
    if not isinstance(encoder, HuggingFaceEncoder):
        raise DataError(
            cfg.tokenizer, found=f"a tokenizer of {encoder.library}", expected="a tokenizer.json of Hugging Face",
            fix="use scripts/prepare_data.py tokenize and data=indexed with other tokenizers",
        )  # fmt: skip
    return encoder


def _dataset(cfg: HubDataConfig) -> HubDataset:
    return HubDataset(
        name=cfg.dataset, subset=cfg.subset, split=cfg.split, revision=cfg.revision, streaming=cfg.streaming
    )
