"""A prepared folder: what a run finds in it."""

from dataclasses import asdict, dataclass
from pathlib import Path

from nvfp4_train.data.manifest import shard_prefixes
from nvfp4_train.data.split import Split
from nvfp4_train.data.write import write_json

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
SHARDS = "tokens"  # of a split that is not one pair: tokens_train_00000 and so on


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a prepared folder holds; ``manifest.json``.

    Args:
        fingerprint: Hash of the tokenizer and of all tokens and boundaries: equal exactly where the data is.
        source_fingerprint: Hash of the text that it was made from.
        num_files: Files or datasets of the corpus.
        num_documents: Documents in each split.
        num_tokens: Tokens in each split, end-of-document tokens included.
        split_method: How validation text was chosen.
        vocab_size: Entries of the tokenizer.
        dtype: dtype of the token files.
        file_digests: Hash of each file in the folder.
        versions: Versions that made it.
    """

    fingerprint: str
    source_fingerprint: str
    num_files: int
    num_documents: dict[str, int]
    num_tokens: dict[str, int]
    split_method: str
    vocab_size: int
    dtype: str
    file_digests: dict[str, str]
    versions: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class PreparedData:
    """A prepared folder.

    Args:
        folder: Where it is.
        manifest: What it holds.
    """

    folder: Path
    manifest: Manifest

    @property
    def tokenizer_path(self) -> Path:
        """Path of ``tokenizer.json``."""
        return self.folder / TOKENIZER

    def prefixes(self, split: Split) -> list[Path]:
        """Return the ``.bin/.idx`` paths of a split, without their endings: one, or as many as it has shards."""
        if f"{split.value}.idx" in self.manifest.file_digests:
            return [self.folder / split.value]
        return shard_prefixes(self.folder / f"{SHARDS}_{split.value}")


def write_prepared(path: Path, manifest: Manifest) -> None:
    """Write a folder's manifest."""
    write_json(path, asdict(manifest))
