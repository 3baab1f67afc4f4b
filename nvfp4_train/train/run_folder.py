"""The folder of a run: what is in it and how it is written."""

import fcntl
import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nvfp4_train.data.write import write_json, write_text


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

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes out of the folder; the lock lies beside it and ends with the process, however it ends.

        Raises:
            ValueError: Another process has it, or the folder of all runs cannot be written.
        """
        path = self.path.with_name(f".{self.path.name}.lock")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists() and not self.path.is_dir():
                raise NotADirectoryError(f"{self.path} is not a folder")
            file = path.open("a+", encoding="utf-8")
        except OSError as error:
            raise ValueError(
                f"the run folder {self.path} cannot be made or used\n    found: {error}\n"
                "    fix:   set run.dir to a folder that can be written, or run.name to another name"
            ) from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                file.seek(0)
                raise ValueError(
                    f"the run folder {self.path} is in use by {file.read() or 'another process'}\n"
                    "    fix: wait until it has ended, or stop it; run.name=NEW_NAME starts another run"
                ) from error
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            yield

    def read_lineage(self) -> dict[str, object] | None:
        """Return what the run started from, if that was the checkpoint of another run.

        Raises:
            ValueError: The file is damaged.
        """
        path = self.path / "lineage.json"
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(
                f"{path} is damaged ({error})\n    fix: restore it, or delete it and lose what the run started from"
            ) from error

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
        write_json(self.path / name, value)
