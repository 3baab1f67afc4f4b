"""Small corpora and token files for tests."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nvfp4_train.config.data import TextFilesDataConfig
from nvfp4_train.data.indexed import IndexedTokens
from nvfp4_train.data.indexed_writer import IndexedWriter

GOLDEN_PAIRS = Path(__file__).parents[1] / "golden" / "megatron_data"
GOLDEN_TEXT = Path(__file__).parents[1] / "golden" / "text"


def write_pair(prefix: Path, documents: Sequence[Sequence[int]], *, dtype: str = "<u2") -> IndexedTokens:
    """Write one sequence a document and open the pair."""
    with IndexedWriter(prefix, dtype=np.dtype(dtype)) as writer:
        for document in documents:
            writer.add_document(np.asarray(document, dtype=np.int64))
    return IndexedTokens(prefix)


def text_config(tmp_path: Path, *paths: Path | str, **changes: object) -> TextFilesDataConfig:
    """Return a config that reads ``paths`` and keeps its files below ``tmp_path``."""
    fields = {
        "cache_dir": str(tmp_path / "cache"),
        "validation_fraction": 0.1,
        "tokenizer_vocab_size": 300,
        "prefetch": 2,
        "paths": [str(path) for path in paths],
        "jsonl_key": "text",
    }
    return TextFilesDataConfig(**(fields | changes))
