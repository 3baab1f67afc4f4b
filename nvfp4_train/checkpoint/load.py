"""Loading, into any layout."""

from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError

import torch
import torch.distributed.checkpoint as dcp
from torch import Size, Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from nvfp4_train.checkpoint.error import CheckpointError, damaged
from nvfp4_train.checkpoint.folder import CheckpointInfo, read_info
from nvfp4_train.checkpoint.ranks import gather_from_ranks, has_ranks
from nvfp4_train.checkpoint.state import State

NAMES_SHOWN = 5
# What reading a damaged `.metadata`, a pickle, raises.
UNREADABLE = (OSError, UnpicklingError, AttributeError, EOFError, ImportError, LookupError, TypeError, ValueError)


@torch.no_grad()
def load_checkpoint(path: Path, state: State, *, engine: str) -> CheckpointInfo:
    """Copy a checkpoint into the tensors of `state`; all ranks call it.

    Args:
        path: A complete checkpoint, saved by any number of ranks.
        state: From `collect_state`; each rank gets the part that it holds.
        engine: Name of the engine that loads.

    Raises:
        CheckpointError: if the checkpoint is incomplete, from another engine, damaged, or of another model or
            optimizer.
    """
    info = read_info(path)
    check_engine(path, info, engine=engine)
    reader = dcp.FileSystemReader(path)
    try:
        saved = reader.read_metadata()
    except UNREADABLE as error:
        raise damaged(path, error) from error
    check_same_shapes(path, _saved_shapes(saved), _shapes_on_all_ranks(state))
    try:
        dcp.load(state, storage_reader=reader, no_dist=not has_ranks())
    except CheckpointException as error:
        raise damaged(path, *(cause for cause, _ in error.failures.values())) from error
    return info


def check_engine(path: Path, info: CheckpointInfo, *, engine: str) -> None:
    """Refuse the checkpoint of another engine.

    Raises:
        CheckpointError: naming the program that converts it.
    """
    if info.engine != engine:
        raise CheckpointError(
            f"{path} was saved by the engine {info.engine}, this run uses {engine}\n"
            f"    fix: python scripts/convert_checkpoint.py {path} TO makes one that {engine} loads; "
            f"or use engine={info.engine}"
        )


def check_same_shapes(path: Path, saved: Mapping[str, Size | None], wanted: Mapping[str, Size]) -> None:
    """Compare names and shapes before anything is overwritten.

    Args:
        path: Of the checkpoint, for the message.
        saved: Name to shape of what is in it; None where that is not a tensor.
        wanted: Name to shape of what it is loaded into.

    Raises:
        CheckpointError: naming what differs.
    """
    complaints = {
        "not in the checkpoint": sorted(set(wanted) - set(saved)),
        "only in the checkpoint": sorted(set(saved) - set(wanted)),
        "of another shape": [
            f"{name} (saved {tuple(shape)}, here {tuple(wanted[name])})"
            for name, shape in saved.items()
            if name in wanted and shape is not None and shape != wanted[name]
        ],
    }
    lines = [f"{len(names)} {what}: {_some(names)}" for what, names in complaints.items() if names]
    if lines:
        raise CheckpointError(f"{path} is of another model or optimizer. Tensors " + "; ".join(lines))


def _saved_shapes(saved: Metadata) -> dict[str, Size | None]:
    return {
        name: entry.size if isinstance(entry, TensorStorageMetadata) else None
        for name, entry in saved.state_dict_metadata.items()
    }


def _shapes_on_all_ranks(state: State) -> dict[str, Size]:
    """Return the shape of each tensor by its name in the storage: keys joined by dots.

    The ranks of a pipeline hold different ones, and together all.
    """
    named: dict[str, Tensor] = {f"model.{name}": tensor for name, tensor in state["model"].items()}
    for name, tensors in state["optimizer"].items():
        named |= {f"optimizer.{name}.{key}": tensor for key, tensor in tensors.items()}
    own = {name: tensor.shape for name, tensor in named.items()}
    return {name: shape for shapes in gather_from_ranks(own) for name, shape in shapes.items()}


def _some(names: list[str]) -> str:
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
