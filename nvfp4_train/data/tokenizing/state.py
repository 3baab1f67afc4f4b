"""How far a job is: written now and then, so that the same command goes on after a kill."""

import fcntl
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nvfp4_train.data.error import DataError
from nvfp4_train.data.sources.record import Cursor
from nvfp4_train.data.write import write_json

_FILE = "progress.json"


@dataclass(kw_only=True)
class JobState:
    """How far a job is.

    Args:
        job: Everything that the output depends on.
        cursor: Where the source goes on; None to begin.
        output: State of the output; None to begin.
        text_digest: Hash of all texts so far, in their order.
        num_empty: Records without text so far.
        num_errors: Records that were skipped so far.
        errors: The first of them.
        is_complete: Whether nothing is left to read, only to put in its place.
    """

    job: dict[str, Any]
    cursor: Cursor | None = None
    output: dict[str, Any] | None = None
    text_digest: str = ""
    num_empty: int = 0
    num_errors: int = 0
    errors: list[str] = field(default_factory=list)
    is_complete: bool = False


def save_state(folder: Path, state: JobState) -> None:
    """Write the state; a kill leaves the old one or the new one."""
    write_json(folder / _FILE, asdict(state))


def load_state(folder: Path, job: dict[str, Any]) -> JobState:
    """Return the state that was saved, or a new one.

    Raises:
        DataError: What was begun there is another job, or the state cannot be read.
    """
    path = folder / _FILE
    fresh = JobState(job=json.loads(json.dumps(job)))
    if not path.is_file():
        return fresh
    fix = f"delete {folder} to start over, or choose another output"
    try:
        state = JobState(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(path, found=f"no readable state ({error})", expected="a state", fix=fix) from error
    changed = sorted(key for key in {*state.job, *fresh.job} if state.job.get(key) != fresh.job.get(key))
    if changed:
        raise DataError(
            folder, found=f"an unfinished job with another {', '.join(changed)}", expected="the same job", fix=fix
        )
    return state


def forget_state(folder: Path) -> None:
    """Remove the state of a job that cannot succeed."""
    (folder / _FILE).unlink(missing_ok=True)


def remove_unused(folder: Path) -> None:
    """Remove a work folder in which nothing was saved."""
    if not (folder / _FILE).is_file():
        shutil.rmtree(folder)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder, which is created if missing.

    Raises:
        DataError: Another process is in it, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise DataError(
            folder, found=str(error), expected="a folder that can be written", fix="choose another output"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel releases it, however we end
        except BlockingIOError as error:
            raise DataError(
                folder, found="another process that writes there", expected="one process an output",
                fix="wait for it, or choose another output",
            ) from error  # fmt: skip
        yield
