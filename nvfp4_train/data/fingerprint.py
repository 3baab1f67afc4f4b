"""A hash that tells token files apart without reading all of them."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from nvfp4_train.data.indexed import IndexedTokens

_PROBES = 64
_PROBE_BYTES = 4096


def pairs_fingerprint(pairs: Sequence[IndexedTokens]) -> str:
    """Return a hash of pairs and their order; names, places and times do not count, so data may be moved.

    Of each file, its size and 64 pieces of 4 KiB, evenly spread, count: files that were made again from other text or
    with another tokenizer differ in nearly every piece. A change of single tokens is not seen; ``prepare_data.py
    verify`` reads everything.
    """
    total = hashlib.blake2b(digest_size=16)
    for pair in pairs:
        for path in (pair.index_path, pair.data_path):
            _add_file(total, path)
    return total.hexdigest()


def combined_fingerprint(*parts: object) -> str:
    """Return a hash of values that JSON can hold."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def _add_file(total: hashlib.blake2b, path: Path) -> None:
    size = path.stat().st_size
    total.update(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        last = max(size - _PROBE_BYTES, 0)
        for probe in range(_PROBES if last else 1):
            file.seek(last * probe // (_PROBES - 1))
            total.update(file.read(_PROBE_BYTES))
