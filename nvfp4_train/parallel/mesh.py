"""The mesh of ranks, its views for the different kinds of parameters, and reductions over its axes.

The same ranks are arranged in four ways, all row-major, so that neighbouring ranks share `tp`:

    axes     pp, dp_replicate, dp_shard, cp, tp     what the configuration says
    dense    pp, dp_replicate, fsdp, tp             parameters are sharded over fsdp = dp_shard x cp
    expert   pp, dp_replicate, efsdp, ep, tp        experts are spread over ep and sharded over efsdp = fsdp / ep
    tokens   pp, tokens, tp                         tokens = dp_replicate x fsdp: ranks that hold different tokens

All are views of one root mesh, which is what lets FSDP2 shard parameters that are DTensors over tp or ep already.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nvfp4_train.config.batch import BatchConfig
from nvfp4_train.config.parallel import ParallelConfig
from nvfp4_train.config.problem import Problem, require
from nvfp4_train.parallel.runtime import Runtime

# Outermost first: neighbouring ranks share the last axis.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
# Axes whose ranks read different sequences.
DATA_AXES = ("dp_replicate", "dp_shard")

# Axes that parameters are sharded over.
FSDP_AXES = ("fsdp", "efsdp")


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Ranks arranged along named axes.

    Args:
        axes: The view with the axes `AXES`, those of degree 1 included.
        dense: The view for parameters that every token meets.
        expert: The view for routed experts.
        tokens: The view for sums over all tokens.
        device: That this rank computes on.
    """

    axes: DeviceMesh
    dense: DeviceMesh
    expert: DeviceMesh
    tokens: DeviceMesh
    device: torch.device

    def degree(self, axis: str) -> int:
        """Return the number of ranks along an axis, `ep` included."""
        return self._along(axis).size()

    def rank(self, axis: str) -> int:
        """Return the index of this rank along an axis, `ep` included."""
        return self._along(axis).get_local_rank()

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return the ranks along an axis that share everything else, `ep` included."""
        return self._along(axis).get_group()

    @property
    def dp_degree(self) -> int:
        """Number of ranks (of a group that shares everything else) that read different sequences."""
        return math.prod(self.degree(axis) for axis in DATA_AXES)

    @property
    def dp_rank(self) -> int:
        """Index of this rank among those `dp_degree`."""
        return self.rank("dp_replicate") * self.degree("dp_shard") + self.rank("dp_shard")

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """What FSDP shards dense parameters over: one axis, or (replicate, shard) where the model has copies."""
        return self.dense["fsdp"] if self.degree("dp_replicate") == 1 else self.dense["dp_replicate", "fsdp"]

    @property
    def expert_fsdp_mesh(self) -> DeviceMesh:
        """What FSDP shards routed experts over, like `fsdp_mesh`."""
        return self.expert["efsdp"] if self.degree("dp_replicate") == 1 else self.expert["dp_replicate", "efsdp"]

    def sum_over_data(self, tensor: Tensor) -> Tensor:
        """Return the sum of `tensor` over the ranks that read different sequences, equal on all ranks.

        On `device`; does not wait for it.
        """
        result = tensor.to(self.device, copy=True)
        for axis in DATA_AXES:
            if self.degree(axis) > 1:
                dist.all_reduce(result, group=self.group(axis))
        return result

    def sum_over_tokens(self, tensor: Tensor) -> Tensor:
        """Return the sum of `tensor` over the ranks that hold different tokens; otherwise as `sum_over_data`."""
        return self._reduce_over_tokens(tensor, dist.ReduceOp.SUM)

    def max_over_tokens(self, tensor: Tensor) -> Tensor:
        """Return the elementwise maximum of `tensor` over the ranks that hold different tokens."""
        return self._reduce_over_tokens(tensor, dist.ReduceOp.MAX)

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """Return the sum of `tensor` over all ranks; otherwise as `sum_over_data`."""
        result = tensor.to(self.device, copy=True)
        dist.all_reduce(result)
        return result

    def max_over_ranks(self, tensor: Tensor) -> Tensor:
        """Return the elementwise maximum of `tensor` over all ranks; otherwise as `sum_over_data`."""
        result = tensor.to(self.device, copy=True)
        dist.all_reduce(result, dist.ReduceOp.MAX)
        return result

    def _reduce_over_tokens(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        result = tensor.to(self.device, copy=True)
        if self.tokens["tokens"].size() > 1:
            dist.all_reduce(result, operation, group=self.tokens["tokens"].get_group())
        return result

    def _along(self, axis: str) -> DeviceMesh:
        return self.expert["ep"] if axis == "ep" else self.axes[axis]

    def check_batch(self, cfg: BatchConfig) -> None:
        """Check that every step gives each data rank the same number of microbatches.

        Raises:
            ConfigError: naming the sizes that do not fit.
        """
        unit = cfg.micro_batch_size * self.dp_degree
        sizes = {"batch.global_batch_size": cfg.global_batch_size}
        if cfg.ramp.tokens:
            sizes |= {"batch.ramp.start": cfg.ramp.start, "batch.ramp.increment": cfg.ramp.increment}
        rule = (
            f"must be a multiple of micro_batch_size x data-parallel ranks = "
            f"{cfg.micro_batch_size} x {self.dp_degree} = {unit}"
        )
        fix = "change it, batch.micro_batch_size or the number of data-parallel ranks"
        require([Problem(key=key, value=size, rule=rule, fix=fix) for key, size in sizes.items() if size % unit])


def build_mesh(cfg: ParallelConfig, runtime: Runtime) -> Mesh:
    """Arrange all ranks along the axes.

    Raises:
        ConfigError: if the degrees do not multiply to the number of ranks, or the experts' ranks do not divide those
            they are taken from.
    """
    degrees = axis_degrees(cfg, world_size=runtime.world_size)
    fsdp = degrees["dp_shard"] * degrees["cp"]
    if fsdp % cfg.ep_degree:
        rule = f"must divide dp_shard_degree x cp_degree = {degrees['dp_shard']} x {degrees['cp']} = {fsdp}"
        require([Problem(key="parallel.ep_degree", value=cfg.ep_degree, rule=rule, fix="change one of the three")])
    pp, replicate, tp = (degrees[axis] for axis in ("pp", "dp_replicate", "tp"))
    root = init_device_mesh(runtime.device.type, (runtime.world_size,), mesh_dim_names=("world",))

    def view(**sizes: int) -> Any:
        # A group of one has nothing to send, except those that FSDP gathers over, which must copy. Real ones cost a
        # few threads each.
        idle: dict[str, Any] = {axis: "fake" for axis, size in sizes.items() if size == 1 and axis not in FSDP_AXES}
        return root._unflatten(0, tuple(sizes.values()), tuple(sizes), backend_override=idle)

    return Mesh(
        axes=view(**degrees),
        dense=view(pp=pp, dp_replicate=replicate, fsdp=fsdp, tp=tp),
        expert=view(pp=pp, dp_replicate=replicate, efsdp=fsdp // cfg.ep_degree, ep=cfg.ep_degree, tp=tp),
        tokens=view(pp=pp, tokens=replicate * fsdp, tp=tp),
        device=runtime.device,
    )


def axis_degrees(cfg: ParallelConfig, *, world_size: int) -> dict[str, int]:
    """Return the degree of each axis in `AXES`, with `dp_shard` filling what the others leave where it is -1.

    Raises:
        ConfigError: if they do not multiply to the number of ranks.
    """
    degrees = {axis: getattr(cfg, f"{axis}_degree") for axis in AXES}
    if degrees["dp_shard"] == -1:
        others = math.prod(degree for axis, degree in degrees.items() if axis != "dp_shard")
        degrees["dp_shard"] = max(world_size // others, 1)
    product = math.prod(degrees.values())
    if product != world_size:
        shown = {axis: degree for axis, degree in degrees.items() if degree > 1 or axis in DATA_AXES}
        found = " x ".join(f"{axis}_degree {degree}" for axis, degree in shown.items())
        rule = f"the product must be the number of ranks, and there are {world_size}"
        fix = f"start {product} ranks, or use parallel.dp_shard_degree=-1 with the other degrees dividing {world_size}"
        require([Problem(key="parallel", value=f"{found} = {product}", rule=rule, fix=fix)])
    return degrees
