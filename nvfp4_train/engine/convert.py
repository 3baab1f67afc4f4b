"""From the checkpoint of one engine to that of the other, on one process and without a model."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from nvfp4_train.checkpoint.error import CheckpointError, damaged
from nvfp4_train.checkpoint.folder import CheckpointInfo, read_info
from nvfp4_train.checkpoint.load import UNREADABLE
from nvfp4_train.checkpoint.save import save_checkpoint, save_files
from nvfp4_train.checkpoint.state import State
from nvfp4_train.checkpoint.zero_files import read_header, read_parameters, write_parameters
from nvfp4_train.engine.deepspeed_engine import DeepSpeedEngine, import_deepspeed
from nvfp4_train.engine.torch_engine import TorchEngine

MASTER = "master"


def convert_checkpoint(source: Path, target: Path) -> str:
    """Write the checkpoint `source` for the other engine, to the folder `target`; needs memory for all of its tensors.

    Masters, optimizer state, buffers, amax histories, the data cursor and everything else that was recorded are taken
    over; ranks and layouts do not matter, on either side.

    Args:
        source: A complete checkpoint, `runs/NAME/checkpoints/step_00000100`.
        target: Does not exist yet.

    Returns:
        What was done, for the user.

    Raises:
        CheckpointError: if `source` cannot be read or `target` not be written.
        ValueError: if DeepSpeed is not installed.
    """
    info = read_info(source)
    if target.resolve().is_relative_to(source.resolve()):
        raise CheckpointError(f"{target} is in {source}\n    fix: name a folder outside of what is converted")
    if target.exists():
        raise CheckpointError(f"{target} exists already\n    fix: name a folder that does not, or move it away")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # which is what we want
        if info.engine == DeepSpeedEngine.name:
            _to_torch(source, target, info)
            engine = TorchEngine.name
        elif info.engine == TorchEngine.name:
            _to_deepspeed(source, target, info)
            engine = DeepSpeedEngine.name
        else:
            known = f"{TorchEngine.name} and {DeepSpeedEngine.name}"
            raise CheckpointError(f"{source} is of engine {info.engine!r}, and those that can be converted are {known}")
    return (
        f"{source} (engine={info.engine}, step {info.step}) -> {target} (engine={engine})\n"
        f"a run goes on with it: engine={engine} resume={target}"
    )


def _to_torch(source: Path, target: Path, info: CheckpointInfo) -> None:
    import_deepspeed()  # its classes are in the files
    header = read_header(source)
    state: State = {"model": dict(header.common), "optimizer": {}}
    for name, tensors in read_parameters(source, header):
        state["model"][name] = tensors.pop(MASTER)
        state["optimizer"][name] = tensors
    name = TorchEngine.name
    save_checkpoint(target, state, engine=name, step=info.step, metadata=info.metadata, owns_folder=False)


def _to_deepspeed(source: Path, target: Path, info: CheckpointInfo) -> None:
    state = _read_torch_state(source)
    write, name = partial(write_parameters, state), DeepSpeedEngine.name
    save_files(target, write, engine=name, step=info.step, metadata=info.metadata, owns_folder=False)


def _read_torch_state(path: Path) -> State:
    """Read every tensor of a checkpoint of the torch engine."""
    reader = dcp.FileSystemReader(path)
    try:
        metadata = reader.read_metadata()
        state: dict[str, Any] = {"model": {}, "optimizer": {}}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            # Keys joined by dots, of which parameter names have some: the planner knows them apart.
            part, *keys = metadata.planner_data[name]
            tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
            _insert(state[part], keys, tensor)
        dcp.load(state, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        raise damaged(path, *(cause for cause, _ in error.failures.values())) from error
    except UNREADABLE as error:
        raise damaged(path, error) from error
    return state


def _insert(values: dict[str, Any], keys: list[str], tensor: Tensor) -> None:
    for key in keys[:-1]:
        values = values.setdefault(key, {})
    values[keys[-1]] = tensor
