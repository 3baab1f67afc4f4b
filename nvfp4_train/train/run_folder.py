"""The folder of a run: what is in it and how it is written."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder ``runs/<run.name>/``.

    Only rank 0 writes. A file is either the old one or the new one, never a part.
    """

    path: Path

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """One JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def is_used(self) -> bool:
        """Whether something is in the folder already."""
        return self.path.exists() and any(self.path.iterdir())

    def read_lineage(self) -> dict[str, object] | None:
        """Return what the run started from, if that was the checkpoint of another run."""
        path = self.path / "lineage.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def write_lineage(self, lineage: Mapping[str, object] | None) -> None:
        """Record what the run started from; None says that it started by itself."""
        if lineage is None:
            (self.path / "lineage.json").unlink(missing_ok=True)
        else:
            self.write_json("lineage.json", lineage)

    def write_text(self, name: str, text: str) -> None:
        """Write a file of the folder in one piece."""
        write_text(self.path / name, text)

    def write_json(self, name: str, value: object) -> None:
        """Write a JSON file of the folder in one piece."""
        self.write_text(name, json.dumps(value, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace the file at ``path`` in one piece, durably; its folder is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
