"""The folder of a checkpoint: its name, its marker, its metadata.

    checkpoints/step_00000100/   tensors, readable by `torch.distributed.checkpoint` alone
                                 metadata.json
                                 COMPLETE, written last
    checkpoints/.step_00000100*  a save or a removal in progress, or what a killed one left

A folder is a checkpoint only with its marker.
"""

import json
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nvfp4_train.checkpoint.error import CheckpointError, damaged
from nvfp4_train.data.write import sync_directory, write_json, write_text

MARKER = "COMPLETE"
METADATA = "metadata.json"
STEP_PREFIX = "step_"
FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """What `metadata.json` holds.

    Args:
        format_version: Of the layout of the folder and of the names in it.
        engine: Name of the engine that saved.
        step: Optimizer steps taken.
        num_ranks: Ranks that saved.
        torch_version: Of the process that saved.
        metadata: The trainer's own.
    """

    format_version: int
    engine: str
    step: int
    num_ranks: int
    torch_version: str
    metadata: dict[str, Any]


def is_complete(path: Path) -> bool:
    """Return whether the folder `path` is a checkpoint that was saved to its end."""
    return (path / MARKER).is_file()


def complete_checkpoints(directory: Path) -> list[Path]:
    """Return the complete checkpoints in `directory`, oldest step first; none if it does not exist."""
    return [path for path in _step_folders(directory) if is_complete(path)]


def latest_checkpoint(directory: Path) -> Path | None:
    """Return the complete checkpoint of the highest step in `directory`; warn of folders without their marker."""
    for path in _step_folders(directory):
        if not is_complete(path):
            warnings.warn(f"{path} is ignored: it has no {MARKER} marker, so it was not saved to its end", stacklevel=2)
    return max(complete_checkpoints(directory), key=_step_of, default=None)


def read_info(path: Path) -> CheckpointInfo:
    """Read what a complete checkpoint says of itself.

    Raises:
        CheckpointError: if there is no complete checkpoint at `path`, or a damaged one, or one of another format
            version.
    """
    if not is_complete(path):
        raise CheckpointError(
            f"{path} is not a checkpoint that can be used: it {_why_unusable(path)}\n"
            f"    fix: name a folder with the file {MARKER}, such as runs/NAME/checkpoints/{STEP_PREFIX}00000100, or a "
            "run folder that has one"
        )
    try:
        values = json.loads((path / METADATA).read_text(encoding="utf-8"))
        version = values["format_version"]
        if version == FORMAT_VERSION:  # other versions may have other keys
            return CheckpointInfo(**values | {"metadata": dict(values["metadata"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(path / METADATA, error) from error
    raise CheckpointError(f"{path} has format version {version}, and this program reads version {FORMAT_VERSION}")


def read_metadata(path: Path) -> dict[str, Any]:
    """Read the trainer's metadata of a complete checkpoint; raises as `read_info` does."""
    return read_info(path).metadata


def write_info(path: Path, info: CheckpointInfo) -> None:
    """Write `metadata.json` into the folder `path`, durably."""
    write_json(path / METADATA, asdict(info))


def mark_complete(path: Path) -> None:
    """Write the marker into the folder `path`, durably: everything else in it must be on disk already."""
    sync_directory(path)
    write_text(path / MARKER, "")
    sync_directory(path)


def _why_unusable(path: Path) -> str:
    if path.is_dir():
        return f"has no {MARKER} marker, so it was not saved to its end"
    return "is not a folder" if path.exists() else "does not exist"


def _step_folders(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    folders = [
        path
        for path in directory.iterdir()
        if path.is_dir() and path.name.startswith(STEP_PREFIX) and path.name.removeprefix(STEP_PREFIX).isdecimal()
    ]
    return sorted(folders, key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix(STEP_PREFIX))
