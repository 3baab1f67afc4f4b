"""Saving: into a hidden sibling first, under its own name only when everything is on disk."""

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from nvfp4_train.checkpoint.error import CheckpointError
from nvfp4_train.checkpoint.folder import (
    FORMAT_VERSION,
    STEP_PREFIX,
    CheckpointInfo,
    complete_checkpoints,
    mark_complete,
    write_info,
)
from nvfp4_train.checkpoint.ranks import gather_from_ranks, has_ranks, is_first_rank, num_ranks
from nvfp4_train.checkpoint.state import State
from nvfp4_train.data.write import sync_directory

PROBE_BYTES = 1 << 20


def save_checkpoint(
    path: Path, state: State, *, engine: str, step: int, metadata: dict[str, Any], owns_folder: bool = True
) -> None:
    """Save a checkpoint; all ranks call it, with the same arguments but for their parts of the tensors.

    Args:
        path: `.../step_00000100`.
        state: From `collect_state`.
        engine: Name of the engine.
        step: Optimizer steps taken.
        metadata: The trainer's own, plain JSON values.
        owns_folder: As for `save_files`.

    Raises:
        CheckpointError: as `save_files` does.
    """
    write = partial(_write_state, state)
    save_files(path, write, engine=engine, step=step, metadata=metadata, owns_folder=owns_folder)


def save_files(
    path: Path,
    write: Callable[[Path], None],
    *,
    engine: str,
    step: int,
    metadata: dict[str, Any],
    owns_folder: bool = True,
) -> None:
    """Save a checkpoint whose files `write` writes; all ranks call it.

    A checkpoint that is at `path` already is replaced.

    Args:
        path: `.../step_00000100`.
        write: Called on every rank with the folder; what it wrote is on disk when it returns.
        engine: Name of the engine.
        step: Optimizer steps taken.
        metadata: The trainer's own, plain JSON values.
        owns_folder: Whether nobody else saves into the same directory, as a run that is going on may: what killed saves
            left there is then removed.

    Raises:
        CheckpointError: on every rank, if any rank failed, for example because the disk is full. What was at
            `path` before and all other checkpoints are as they were.
    """
    info = CheckpointInfo(
        format_version=FORMAT_VERSION,
        engine=engine,
        step=step,
        num_ranks=num_ranks(),
        torch_version=torch.__version__,
        metadata=metadata,
    )
    temporary = path.with_name(f".{path.name}.saving")
    for stage in (
        partial(_start, temporary, owns_folder=owns_folder),
        partial(write, temporary),
        partial(_finish, temporary, path, info),
    ):
        problems = gather_from_ranks(_problem_of(stage))
        found = {rank: problem for rank, problem in enumerate(problems) if problem is not None}
        if found:
            if is_first_rank():
                shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(_explain(path, found))


def _start(temporary: Path, *, owns_folder: bool) -> None:
    if not is_first_rank():
        return
    temporary.parent.mkdir(parents=True, exist_ok=True)
    leftovers = set(temporary.parent.glob(f".{STEP_PREFIX}*")) if owns_folder else set()
    for leftover in leftovers | {temporary}:
        if leftover.is_dir():
            shutil.rmtree(leftover)
    temporary.mkdir()


def _write_state(state: State, temporary: Path) -> None:
    # One thread, because the writer loses what goes wrong in another.
    writer = dcp.FileSystemWriter(temporary, thread_count=1, sync_files=True)
    try:
        dcp.save(state, storage_writer=writer, no_dist=not has_ranks())
    except CheckpointException:
        _probe(temporary)
        raise


def _probe(directory: Path) -> None:
    """Write a little, for an error that says why: PyTorch's zip writer turns a full disk into "unexpected pos"."""
    with (directory / "probe").open("wb") as file:
        file.write(bytes(PROBE_BYTES))
        file.flush()
        os.fsync(file.fileno())


def _finish(temporary: Path, path: Path, info: CheckpointInfo) -> None:
    if not is_first_rank():
        return
    write_info(temporary, info)
    mark_complete(temporary)
    if path.exists():
        path.rename(path.with_name(f".{path.name}.replaced"))
    temporary.rename(path)
    sync_directory(path.parent)
    shutil.rmtree(path.with_name(f".{path.name}.replaced"), ignore_errors=True)


def _problem_of(stage: Callable[[], None]) -> str | None:
    """Run a stage and return what went wrong, so that all ranks can hear of it."""
    try:
        stage()
    except CheckpointException as error:  # of the writers of any rank
        causes = {f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values()}
        return "; ".join(sorted(causes))
    except (OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _explain(path: Path, found: dict[int, str]) -> str:
    folder = next(parent for parent in path.absolute().parents if parent.is_dir())
    free_gib = shutil.disk_usage(folder).free / 2**30
    complete = complete_checkpoints(path.parent)
    usable = (
        f"{complete[-1].name} stays usable: the run resumes from it" if complete else "there is no earlier checkpoint"
    )
    ranks = ", ".join(map(str, found))
    reasons = "; ".join(dict.fromkeys(found.values()))
    return f"{path} was not saved ({free_gib:.2f} GiB are free there). On rank {ranks}: {reasons}. {usable}."
