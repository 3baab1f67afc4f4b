"""How small files are written: whole or not at all, and still there after the power fails."""

import json
import os
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Replace the file at `path` in one piece: a reader, or the next start after a kill, finds the old one or the new.

    Its folder is made if it is missing. One process at a time writes a file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_directory(path.parent)


def write_json(path: Path, value: object) -> None:
    """Replace the file at `path` by `value` as JSON, as `write_text` does.

    Raises:
        TypeError: `value` has no JSON form; the old file stays.
    """
    write_text(path, json.dumps(value, indent=2) + "\n")


def sync_directory(path: Path) -> None:
    """Make the entries of a directory durable: a file's own fsync does not cover its name."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
