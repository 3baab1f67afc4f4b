"""Small sources of text in every format, and commands run in processes that can be killed."""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from nvfp4_train.data.sources.file_source import FileSource
from nvfp4_train.data.sources.files import find_source_files
from nvfp4_train.data.sources.record import parse_batch
from nvfp4_train.data.staging import Staging

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "prepare_data.py"


def write_jsonl(path: Path, texts: Sequence[str], *, column: str = "text") -> Path:
    """Write one JSON object a line; the ending says whether and how to compress."""
    raw = "".join(json.dumps({column: text, "id": number}) + "\n" for number, text in enumerate(texts)).encode()
    match path.suffix:
        case ".gz":
            raw = gzip.compress(raw)
        case ".zst":
            zstandard = pytest.importorskip("zstandard")
            # Two frames, as joining two files makes them.
            cut = raw.index(b"\n", len(raw) // 2) + 1
            raw = b"".join(zstandard.ZstdCompressor().compress(part) for part in (raw[:cut], raw[cut:]))
    path.write_bytes(raw)
    return path


def write_parquet(path: Path, texts: Sequence[str | None], *, group_rows: int = 1000) -> Path:
    """Write a table with the columns of FineWeb-Edu."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    count = len(texts)
    table = pyarrow.table(
        {
            "text": pyarrow.array(texts, pyarrow.string()),
            "id": [f"<urn:uuid:{number}>" for number in range(count)],
            "dump": ["CC-MAIN-2024-10"] * count,
            "url": ["https://example.org"] * count,
            "file_path": ["s3://commoncrawl"] * count,
            "language": ["en"] * count,
            "language_score": [0.9] * count,
            "token_count": pyarrow.array(range(count), pyarrow.int64()),
            "score": [3.0] * count,
            "int_score": pyarrow.array([3] * count, pyarrow.int64()),
        }
    )
    parquet.write_table(table, path, row_group_size=group_rows)
    return path


def file_source(tmp_path: Path, *inputs: Path, column: str = "text") -> FileSource:
    """Open local files as a source."""
    files = find_source_files([str(path) for path in inputs])
    return FileSource(files, column=column, staging=Staging(tmp_path / "staging", max_bytes=0))


def texts_of(batches) -> list[str]:
    """Return the texts of some batches, none of which may hold a bad record."""
    parsed = [parse_batch(batch) for batch in batches]
    assert not [error for item in parsed for error in item.errors]
    return [text for item in parsed for text in item.texts]


def assert_resumes_anywhere(source, again) -> list[str]:
    """Check that reading from every cursor gives the rest; return all texts.

    Args:
        source: A source.
        again: Opens the same source anew.
    """
    batches = list(source.batches(None))
    whole = texts_of(batches)
    for index, batch in enumerate(batches):
        # As it comes back from disk.
        cursor = json.loads(json.dumps(batch.cursor))
        rest = list(again().batches(cursor))
        assert texts_of(batches[: index + 1]) + texts_of(rest) == whole
        # Batches end at the same records wherever reading begins.
        assert [item.records for item in rest] == [item.records for item in batches[index + 1 :]]
    return whole


def prepare(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run `prepare_data.py` in a process of its own."""
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd or ROOT, capture_output=True, text=True, check=False, timeout=120, env=child_environment()
    )


def child_environment() -> dict[str, str]:
    """Return this process's environment, with the package importable."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
