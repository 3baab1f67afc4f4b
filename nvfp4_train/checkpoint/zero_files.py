"""The files that DeepSpeed writes for ZeRO 1 to 3, read without its engine and for any number of ranks.

    step_00000100/zero/mp_rank_00_model_states.pt                    shapes, and `common` below; stages 1 and 2
                       zero_pp_rank_<rank>_mp_rank_00_model_states.pt  the same; stage 3
                       zero_pp_rank_<rank>_mp_rank_00_optim_states.pt  this rank's masters and optimizer state, flat

A group is flat: its parameters one after the other. Stages 1 and 2 cut the whole group into one piece per rank, stage 3
every parameter. Only PyTorch reads these files here, but what they pickle are DeepSpeed's classes: it must be imported.

Source: `deepspeed.checkpoint.ds_to_universal` and `deepspeed.utils.zero_to_fp32` of DeepSpeed 0.19.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Size, Tensor

from nvfp4_train.checkpoint.error import damaged
from nvfp4_train.checkpoint.load import UNREADABLE
from nvfp4_train.checkpoint.state import State

TAG = "zero"  # the folder of DeepSpeed's files in a checkpoint
COMMON = "nvfp4_train"  # key of what is ours in its model states
_LAST_STAGE = 3  # the one that cuts every parameter
_ADAMW_STATE = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class ZeroHeader:
    """What the model states say.

    Args:
        stage: Of ZeRO.
        num_ranks: That saved.
        groups: Of each flat group, name to shape of its parameters, in order.
        common: What all ranks hold alike: buffers and amax histories, by name.
    """

    stage: int
    num_ranks: int
    groups: list[dict[str, Size]]
    common: dict[str, Tensor]

    @property
    def shapes(self) -> dict[str, Size | None]:
        """Name to shape of every parameter and common tensor."""
        shapes: dict[str, Size | None] = {name: tensor.shape for name, tensor in self.common.items()}
        return shapes | {name: shape for group in self.groups for name, shape in group.items()}


def read_header(path: Path) -> ZeroHeader:
    """Read the header of the checkpoint `path`.

    Raises:
        CheckpointError: if a file is missing or damaged.
    """
    names = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
    file = next((path / TAG / name for name in names if (path / TAG / name).exists()), path / TAG / names[0])
    states = _load(file)
    try:
        return ZeroHeader(
            stage=states["ds_config"]["zero_optimization"]["stage"],
            num_ranks=states["dp_world_size"],
            groups=[dict(group) for group in states["param_shapes"]],
            common=states[COMMON],
        )
    except (KeyError, TypeError) as error:
        raise damaged(file, error) from error


def read_state(path: Path) -> State:
    """Put the ranks' pieces of the checkpoint `path` together, as `collect_state` would show them on one rank.

    Raises:
        CheckpointError: if a file is missing or damaged.
    """
    header = read_header(path)
    files = [path / TAG / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(header.num_ranks)]
    ranks = [_load(file) for file in files]
    state: State = {"model": dict(header.common), "optimizer": {}}
    try:
        shards = [_Shard.of(saved["optimizer_state_dict"], stage=header.stage) for saved in ranks]
        for index, group in enumerate(header.groups):
            for name, shape in group.items():
                pieces = [shard.pieces(index, name, header=header, rank=rank) for rank, shard in enumerate(shards)]
                tensors = {key: torch.cat([piece[key] for piece in pieces]).view(shape) for key in pieces[0]}
                state["model"][name] = tensors.pop("master")
                state["optimizer"][name] = {"step": shards[0].step(index), **tensors}
    except (KeyError, TypeError, RuntimeError) as error:
        raise damaged(path / TAG, error) from error
    return state


@dataclass(frozen=True, kw_only=True)
class _Shard:
    """What one rank holds.

    Args:
        masters: FP32, one flat tensor per group.
        states: Optimizer state by group; empty before the first update.
        places: Stages 1 and 2: of each group, the name of a parameter to where its piece lies, if there is one.
    """

    masters: list[Tensor]
    states: dict[int, dict[str, Any]]
    places: list[dict[str, Any]] | None

    @classmethod
    def of(cls, saved: dict[str, Any], *, stage: int) -> "_Shard":
        if stage == _LAST_STAGE:
            return cls(masters=saved["fp32_flat_groups"], states=saved["optimizer_state_dict"]["state"], places=None)
        return cls(
            masters=saved["single_partition_of_fp32_groups"],
            states=saved["base_optimizer_state"]["state"],
            places=saved["param_slice_mappings"],
        )

    def step(self, group: int) -> Tensor:
        """Return how many updates were applied, as AdamW keeps it."""
        return torch.as_tensor(self.states.get(group, {}).get("step", 0), dtype=torch.float32)

    def pieces(self, group: int, name: str, *, header: ZeroHeader, rank: int) -> dict[str, Tensor]:
        """Return this rank's piece, maybe empty, of a parameter's master and of its optimizer state."""
        if self.places is None:
            start, size = _place(header, group, name, rank=rank)
        else:
            place = self.places[group].get(name)
            start, size = (0, 0) if place is None else (place.start, place.numel)
        master = self.masters[group].detach().flatten().narrow(0, start, size)
        state = self.states.get(group)
        if state is None:
            return {"master": master} | {key: torch.zeros_like(master) for key in _ADAMW_STATE}
        return {"master": master} | {key: state[key].flatten().narrow(0, start, size) for key in _ADAMW_STATE}


def _place(header: ZeroHeader, group: int, name: str, *, rank: int) -> tuple[int, int]:
    """Return start and size of a parameter's piece on a rank of stage 3, where all ranks hold as much, but padded."""
    start = 0
    for other, size in _sizes(header.groups[group]):
        share = math.ceil(size / header.num_ranks)
        if other == name:
            return start, max(0, min(share, size - rank * share))
        start += share
    raise KeyError(name)


def _sizes(group: dict[str, Size]) -> Iterator[tuple[str, int]]:
    return ((name, math.prod(shape)) for name, shape in group.items())


def _load(file: Path) -> dict[str, Any]:
    try:
        states: dict[str, Any] = torch.load(file, map_location="cpu", mmap=True, weights_only=False)
    except (*UNREADABLE, RuntimeError) as error:
        raise damaged(file, error) from error
    return states
