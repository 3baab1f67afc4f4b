"""The mesh of ranks, and sums over its data axes."""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nvfp4_train.config.batch import BatchConfig
from nvfp4_train.config.parallel import ParallelConfig
from nvfp4_train.parallel.runtime import Runtime

# Outermost first: neighbouring ranks share the last axis. An axis is named here and gets its degree in `_axis_degrees`.
AXES = ("dp_replicate", "dp_shard")
# Axes whose ranks read different sequences.
DATA_AXES = ("dp_replicate", "dp_shard")


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Ranks arranged along named axes.

    Args:
        device_mesh: With the axes `AXES`, those of degree 1 included.
        device: That this rank computes on.
    """

    device_mesh: DeviceMesh
    device: torch.device

    def degree(self, axis: str) -> int:
        """Return the number of ranks along an axis."""
        return self.device_mesh.size(AXES.index(axis))

    @property
    def dp_degree(self) -> int:
        """Number of ranks (of a group that shares everything else) that read different sequences."""
        return math.prod(self.degree(axis) for axis in DATA_AXES)

    @property
    def dp_rank(self) -> int:
        """Index of this rank among those `dp_degree`."""
        index = 0
        for axis in DATA_AXES:
            index = index * self.degree(axis) + self.device_mesh.get_local_rank(axis)
        return index

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """What FSDP shards over: one axis, or (replicate, shard) where the sharded model has copies."""
        if self.degree("dp_replicate") == 1:
            return self.device_mesh["dp_shard"]
        return self.device_mesh["dp_replicate", "dp_shard"]

    def sum_over_data(self, tensor: Tensor) -> Tensor:
        """Return the sum of `tensor` over the data axes, on `device`, equal on all ranks; does not wait for it."""
        return self._reduce_over_data(tensor, dist.ReduceOp.SUM)

    def max_over_data(self, tensor: Tensor) -> Tensor:
        """Return the elementwise maximum of `tensor` over the data axes; otherwise as `sum_over_data`."""
        return self._reduce_over_data(tensor, dist.ReduceOp.MAX)

    def _reduce_over_data(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        result = tensor.to(self.device, copy=True)
        for axis in DATA_AXES:
            if self.degree(axis) > 1:
                dist.all_reduce(result, operation, group=self.device_mesh.get_group(axis))
        return result

    def check_batch(self, cfg: BatchConfig) -> None:
        """Check that every step gives each data rank the same number of microbatches.

        Raises:
            ValueError: naming the size that does not fit.
        """
        unit = cfg.micro_batch_size * self.dp_degree
        sizes = {"batch.global_batch_size": cfg.global_batch_size}
        if cfg.ramp.tokens:
            sizes |= {"batch.ramp.start": cfg.ramp.start, "batch.ramp.increment": cfg.ramp.increment}
        for key, size in sizes.items():
            if size % unit:
                raise ValueError(
                    f"{key} = {size} must be a multiple of micro_batch_size x data-parallel ranks = "
                    f"{cfg.micro_batch_size} x {self.dp_degree} = {unit}; change one of the three"
                )


def build_mesh(cfg: ParallelConfig, runtime: Runtime) -> Mesh:
    """Arrange all ranks along the axes.

    Raises:
        ValueError: if the degrees do not multiply to the number of ranks.
    """
    degrees = _axis_degrees(cfg, world_size=runtime.world_size)
    device_mesh = init_device_mesh(runtime.device.type, tuple(degrees[axis] for axis in AXES), mesh_dim_names=AXES)
    return Mesh(device_mesh=device_mesh, device=runtime.device)


def _axis_degrees(cfg: ParallelConfig, *, world_size: int) -> dict[str, int]:
    """Return the degree of each axis, with `dp_shard` filling what the others leave where it is -1."""
    degrees = {"dp_replicate": cfg.dp_replicate_degree, "dp_shard": cfg.dp_shard_degree}
    if degrees["dp_shard"] == -1:
        others = math.prod(degree for axis, degree in degrees.items() if axis != "dp_shard")
        degrees["dp_shard"] = max(world_size // others, 1)
    product = math.prod(degrees.values())
    if product != world_size:
        found = " x ".join(f"{axis}_degree {degree}" for axis, degree in degrees.items())
        raise ValueError(
            f"parallel: {found} = {product}, but there are {world_size} ranks; "
            f"start {product} ranks, or use parallel.dp_shard_degree=-1 with the other degrees dividing {world_size}"
        )
    return degrees
