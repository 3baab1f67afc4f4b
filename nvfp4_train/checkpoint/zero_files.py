"""The files of a DeepSpeed checkpoint: where its ranks hold what, reading for any layout, and writing one rank's.

    step_00000100/zero/mp_rank_00_model_states.pt                      shapes, and `common` below; stages 1 and 2
                       zero_pp_rank_<rank>_mp_rank_00_model_states.pt  the same; stage 3
                       zero_pp_rank_<rank>_mp_rank_00_optim_states.pt  the rank's masters and optimizer state, flat

A group is flat: its parameters one after the other. Stages 1 and 2 cut the whole group into one piece per rank, stage 3
each parameter. Only PyTorch reads these files here, but DeepSpeed pickles classes of its own: it must be imported.

Source: `deepspeed.checkpoint.ds_to_universal` and `deepspeed.utils.zero_to_fp32` of DeepSpeed 0.19.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Size, Tensor

from nvfp4_train.checkpoint.error import damaged
from nvfp4_train.checkpoint.load import UNREADABLE
from nvfp4_train.checkpoint.state import State
from nvfp4_train.data.write import sync_directory

TAG = "zero"  # the folder of DeepSpeed's files in a checkpoint
COMMON = "nvfp4_train"  # key of what is ours in the model states
MODEL_STATES = "mp_rank_00_model_states.pt"
OPTIM_STATES = "zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
ADAMW_STATE = ("exp_avg", "exp_avg_sq")
_LAST_STAGE = 3  # the one that cuts each parameter
_ALIGNMENT = 2  # of a rank's piece of a group in the other stages, in elements

Group = dict[str, Size]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a model is spread.

    Args:
        stage: Of ZeRO.
        num_ranks: Ranks that share it.
        groups: Of each flat group, name to shape of its parameters, in order.
    """

    stage: int
    num_ranks: int
    groups: list[Group]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A rank's piece of a parameter.

    Args:
        group: Index of the flat group.
        start: Where the piece begins in what the rank holds of that group.
        offset: Where it begins in the flattened parameter.
        size: Elements; may be 0.
    """

    group: int
    start: int
    offset: int
    size: int

    def of_rank(self, flat: Tensor) -> Tensor:
        """Return the piece as a view of what the rank holds."""
        return flat.narrow(0, self.start, self.size)

    def of_whole(self, parameter: Tensor) -> Tensor:
        """Return the piece of a whole parameter."""
        return parameter.flatten().narrow(0, self.offset, self.size)


@dataclass(frozen=True, kw_only=True)
class ZeroHeader:
    """What the model states say.

    Args:
        layout: Of the ranks that saved.
        common: What they hold alike: buffers and amax histories, by name.
    """

    layout: Layout
    common: dict[str, Tensor]

    @property
    def shapes(self) -> dict[str, Size | None]:
        """Name to shape of every parameter and common tensor."""
        shapes: dict[str, Size | None] = {name: tensor.shape for name, tensor in self.common.items()}
        return shapes | {name: shape for group in self.layout.groups for name, shape in group.items()}


def locate(layout: Layout, *, rank: int) -> dict[str, Piece]:
    """Return the piece of every parameter that `rank` holds."""
    place = _place_in_parameters if layout.stage == _LAST_STAGE else _place_in_groups
    return {
        name: piece for index, group in enumerate(layout.groups) for name, piece in place(layout, index, group, rank)
    }


def read_header(path: Path) -> ZeroHeader:
    """Read the header of the checkpoint `path`.

    Raises:
        CheckpointError: if a file is missing or damaged.
    """
    folder = path / TAG
    names = (MODEL_STATES, f"zero_pp_rank_0_{MODEL_STATES}")
    file = next((folder / name for name in names if (folder / name).exists()), folder / MODEL_STATES)
    states = _load(file)
    try:
        layout = Layout(
            stage=states["ds_config"]["zero_optimization"]["stage"],
            num_ranks=states["dp_world_size"],
            groups=[dict(group) for group in states["param_shapes"]],
        )
        return ZeroHeader(layout=layout, common=states[COMMON])
    except (KeyError, TypeError) as error:
        raise damaged(file, error) from error


def read_parameters(path: Path, header: ZeroHeader) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Put the pieces of one parameter after the other together, and only those into memory.

    Yields:
        Name, and whole FP32 tensors on the CPU: `master`, `exp_avg`, `exp_avg_sq` (zero before the first update) and
        the scalar `step`.

    Raises:
        CheckpointError: if a file is missing or damaged.
    """
    layout = header.layout
    files = [path / TAG / OPTIM_STATES.format(rank=rank) for rank in range(layout.num_ranks)]
    held = [_held_by_rank(file, stage=layout.stage) for file in files]
    pieces = [locate(layout, rank=rank) for rank in range(layout.num_ranks)]
    for index, group in enumerate(layout.groups):
        for name, shape in group.items():
            try:
                parts = [_cut(flats[index], own[name]) for flats, own in zip(held, pieces, strict=True)]
                whole = {key: torch.cat([part[key] for part in parts]).view(shape) for key in parts[0]}
            except (IndexError, KeyError, RuntimeError) as error:
                raise damaged(path / TAG, error) from error
            yield name, whole | {"step": torch.as_tensor(held[0][index].get("step", 0.0), dtype=torch.float32)}


def write_parameters(state: State, folder: Path) -> None:
    """Write a state as one rank of stage 1 would, into `folder`, durably; DeepSpeed's own bookkeeping is left out.

    Args:
        state: Whole plain tensors, as `collect_state` has them.
        folder: Of a checkpoint.
    """
    masters, optimizer = state["model"], state["optimizer"]
    parameters = list(optimizer)

    def flat(key: str) -> Tensor:
        return torch.cat([optimizer[name][key].flatten() for name in parameters])

    step = optimizer[parameters[0]]["step"]
    states = {
        "ds_config": {"zero_optimization": {"stage": 1}},
        "dp_world_size": 1,
        "param_shapes": [{name: masters[name].shape for name in parameters}],
        COMMON: {name: tensor for name, tensor in masters.items() if name not in optimizer},
    }
    shard = {
        "single_partition_of_fp32_groups": [torch.cat([masters[name].flatten() for name in parameters])],
        "base_optimizer_state": {"state": {0: {"step": step} | {key: flat(key) for key in ADAMW_STATE}}},
    }
    (folder / TAG).mkdir()
    write_file(states, folder / TAG / MODEL_STATES)
    write_file({"optimizer_state_dict": shard}, folder / TAG / OPTIM_STATES.format(rank=0))
    sync_directory(folder / TAG)


def write_file(values: dict[str, Any], path: Path) -> None:
    """Write one file, durably."""
    with path.open("wb") as file:
        torch.save(values, file)
        file.flush()
        os.fsync(file.fileno())


def _place_in_groups(layout: Layout, index: int, group: Group, rank: int) -> Iterator[tuple[str, Piece]]:
    unit = _ALIGNMENT * layout.num_ranks
    share = math.ceil(sum(map(math.prod, group.values())) / unit) * unit // layout.num_ranks
    first, start = rank * share, 0
    for name, shape in group.items():
        end = start + math.prod(shape)
        low, high = max(start, first), min(end, first + share)
        size = max(0, high - low)
        yield name, Piece(group=index, start=low - first if size else 0, offset=low - start if size else 0, size=size)
        start = end


def _place_in_parameters(layout: Layout, index: int, group: Group, rank: int) -> Iterator[tuple[str, Piece]]:
    start = 0
    for name, shape in group.items():
        whole = math.prod(shape)
        share = math.ceil(whole / layout.num_ranks)  # padded on the last ranks
        offset = min(rank * share, whole)
        yield name, Piece(group=index, start=start, offset=offset, size=min(share, whole - offset))
        start += share


def _cut(flats: dict[str, Any], piece: Piece) -> dict[str, Tensor]:
    master = piece.of_rank(flats["master"])
    return {"master": master} | {
        key: piece.of_rank(flats[key]) if key in flats else torch.zeros_like(master) for key in ADAMW_STATE
    }


def _held_by_rank(file: Path, *, stage: int) -> list[dict[str, Any]]:
    """Return the flat tensors of each group: `master`, and after the first update `exp_avg`, `exp_avg_sq`, `step`."""
    saved = _load(file)
    try:
        shard = saved["optimizer_state_dict"]
        if stage == _LAST_STAGE:
            masters, states = shard["fp32_flat_groups"], shard["optimizer_state_dict"]["state"]
        else:
            masters, states = shard["single_partition_of_fp32_groups"], shard["base_optimizer_state"]["state"]
        return [{"master": master.detach().flatten(), **states.get(index, {})} for index, master in enumerate(masters)]
    except (KeyError, TypeError, AttributeError) as error:
        raise damaged(file, error) from error


def _load(file: Path) -> dict[str, Any]:
    try:
        states: dict[str, Any] = torch.load(file, map_location="cpu", mmap=True, weights_only=False)
    except (*UNREADABLE, RuntimeError) as error:
        raise damaged(file, error) from error
    return states
