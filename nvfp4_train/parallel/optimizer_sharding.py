"""How an optimizer reaches the parts of DTensors, and whole matrices where it needs them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from nvfp4_train.optim.sharding import Sharding
from nvfp4_train.parallel.local import local_part

MATRIX_DIMS = 2


def dtensor_sharding() -> Sharding:
    """Return the access to parameters that are DTensors over any mesh, or plain tensors."""
    return Sharding(local=local_part, zeros_like=_zeros_like, map_whole=map_whole)


def map_whole(tensors: list[Tensor], functions: Sequence[Callable[[Tensor], Tensor]]) -> list[Tensor]:
    """Apply functions to whole matrices and return this rank's part of each result; see `Sharding`.

    A matrix whose rows or columns are shared over one mesh axis travels to one rank of it, a different one for each of
    neighbouring matrices, and back: each is computed once. One that is shared over several axes is computed by all its
    ranks. One that is whole on this rank, though its experts are spread, does not travel.
    """
    results: list[Tensor | None] = [None] * len(tensors)
    traveling: dict[_Route, list[int]] = {}
    for index, (tensor, function) in enumerate(zip(tensors, functions, strict=True)):
        sharded = _sharded_axes(tensor)
        if not sharded:
            results[index] = function(local_part(tensor))
        elif len(sharded) == 1 and isinstance(tensor, DTensor):
            traveling.setdefault(_route(tensor, sharded[0]), []).append(index)
        else:
            assert isinstance(tensor, DTensor)
            whole = function(tensor.full_tensor())
            results[index] = distribute_tensor(
                whole, tensor.device_mesh, tensor.placements, src_data_rank=None
            ).to_local()
    for route, indices in traveling.items():
        for start in range(0, len(indices), route.num_ranks):
            batch = indices[start : start + route.num_ranks]
            parts = route.apply([local_part(tensors[i]) for i in batch], [functions[i] for i in batch])
            for index, part in zip(batch, parts, strict=True):
                results[index] = part
    return [result for result in results if result is not None]


@dataclass(frozen=True)
class _Route:
    """Ranks that share matrices of one shape along one dim.

    Args:
        group: The ranks.
        dim: The dim that is shared, from the back.
        sizes: What each rank holds of it.
        shape: Of the part of this rank.
    """

    group: dist.ProcessGroup
    dim: int
    sizes: tuple[int, ...]
    shape: torch.Size

    @property
    def num_ranks(self) -> int:
        return len(self.sizes)

    def apply(self, parts: list[Tensor], functions: Sequence[Callable[[Tensor], Tensor]]) -> list[Tensor]:
        """Send part i of each matrix to rank i, which applies its function, and send the results back."""
        rank = dist.get_rank(self.group)
        own = [parts[owner].numel() if owner < len(parts) else 0 for owner in range(self.num_ranks)]
        others = [self._numel(source) if rank < len(parts) else 0 for source in range(self.num_ranks)]
        sent = torch.cat([part.flatten() for part in parts])
        received = sent.new_empty(sum(others))
        dist.all_to_all_single(received, sent, others, own, group=self.group)
        if rank < len(parts):
            pieces = [piece.view(self._shape(source)) for source, piece in enumerate(received.split(others))]
            whole = functions[rank](torch.cat(pieces, dim=self.dim))
            received = torch.cat([piece.flatten() for piece in whole.split(self.sizes, dim=self.dim)])
        dist.all_to_all_single(sent, received, own, others, group=self.group)
        return [piece.view(self.shape) for piece in sent.split([part.numel() for part in parts])]

    def _shape(self, rank: int) -> list[int]:
        shape = list(self.shape)
        shape[self.dim] = self.sizes[rank]
        return shape

    def _numel(self, rank: int) -> int:
        return torch.Size(self._shape(rank)).numel()


def _route(tensor: DTensor, axis: int) -> _Route:
    mesh, dim = tensor.device_mesh, tensor.placements[axis].dim  # type: ignore[attr-defined]
    chunks = torch.empty(tensor.shape[dim], device="meta").chunk(mesh.size(axis))
    sizes = [len(chunk) for chunk in chunks] + [0] * (mesh.size(axis) - len(chunks))
    return _Route(mesh.get_group(axis), dim - tensor.ndim, tuple(sizes), tensor.to_local().shape)


def _sharded_axes(tensor: Tensor) -> list[int]:
    """Return the mesh axes over which the matrices of a tensor (not only its experts) are shared."""
    if not isinstance(tensor, DTensor):
        return []
    return [
        axis
        for axis, placement in enumerate(tensor.placements)
        if placement.is_shard() and tensor.device_mesh.size(axis) > 1 and placement.dim >= tensor.ndim - MATRIX_DIMS  # type: ignore[attr-defined]
    ]


def _zeros_like(tensor: Tensor, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    local = local_part(tensor)
    zeros = torch.zeros_like(local, dtype=dtype, device=device)
    if device.type == "cpu" and local.device.type != "cpu":
        zeros = zeros.pin_memory()
    if not isinstance(tensor, DTensor):
        return zeros
    return DTensor.from_local(
        zeros, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
