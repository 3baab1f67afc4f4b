"""From a sharded model on the meta device to one with values."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from nvfp4_train.model.hybrid import HybridLM
from nvfp4_train.model.init import init_parameters
from nvfp4_train.parallel.mesh import Mesh


def materialize(model: HybridLM, *, mesh: Mesh, seed: int, stages: Sequence[HybridLM] = ()) -> None:
    """Allocate the parameters of `model` and initialize them; values depend on seed and name, not on the layout.

    Args:
        model: All that this rank has, after the parallel pass.
        mesh: Of all ranks.
        seed: Of the run.
        stages: The parts that were sharded each on its own, where `model` holds several.
    """
    for root in stages or (model,):  # sharding notices a move of its own root only
        root.to_empty(device=mesh.device)
    init_parameters(model, model.cfg, seed=seed, write=write_shard)


@torch.no_grad()
def write_shard(parameter: Tensor, value: Tensor) -> None:
    """Copy into a parameter the part of the full `value` that this rank holds; every rank passes the same value."""
    if isinstance(parameter, DTensor):
        # Without a source rank each rank cuts its own piece and nothing is sent.
        shard = distribute_tensor(
            value.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
        )
        parameter.to_local().copy_(shard.to_local())
    else:
        parameter.copy_(value)
