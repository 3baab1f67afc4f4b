"""The global gradient norm, and clipping by it."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from nvfp4_train.parallel.local import local_part


@torch.no_grad()
def global_grad_norm(parameters: Iterable[Tensor], *, pipeline: dist.ProcessGroup | None = None) -> Tensor:
    """Return the Euclidean norm of all gradients together, the same on every rank; without waiting for the device.

    Args:
        parameters: DTensors sharded or replicated over any mesh, or plain tensors; those without a gradient are
            left out.
        pipeline: Ranks that hold other parameters; those that several of them hold are in `parameters` of one only.

    Returns:
        FP32 scalar; NaN or infinite if any gradient on any rank is.
    """
    parameters = list(parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    # Gradients that are spread over the same ranks share one reduction.
    by_layout: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for gradient in gradients:
        by_layout.setdefault(_sharding_groups(gradient), []).append(local_part(gradient))
    total = torch.zeros((), dtype=torch.float64, device=parameters[0].device)
    for groups, tensors in by_layout.items():
        norms = torch.stack(torch._foreach_norm(tensors, dtype=torch.float32))
        squares = norms.to(torch.float64).square().sum()
        for group in groups:
            dist.all_reduce(squares, group=group)
        total += squares
    if pipeline is not None:
        dist.all_reduce(total, group=pipeline)
    return total.sqrt().to(torch.float32)


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], *, norm: Tensor, max_norm: float) -> None:
    """Scale all gradients by `max_norm / norm` where that is below 1.

    Args:
        parameters: As for `global_grad_norm`.
        norm: Their global norm, FP32 scalar.
        max_norm: Largest norm that is left alone.
    """
    gradients = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))


def _sharding_groups(gradient: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups of ranks that hold different parts of a gradient, one per mesh axis it is sharded over."""
    if not isinstance(gradient, DTensor):
        return ()
    mesh = gradient.device_mesh
    return tuple(
        mesh.get_group(axis)
        for axis, placement in enumerate(gradient.placements)
        if not placement.is_replicate() and mesh.size(axis) > 1  # FSDP's strided shards are no Shard
    )
