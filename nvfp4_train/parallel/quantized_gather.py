"""FSDP2 that gathers codes and scales of a weight instead of its BF16 values.

Each rank quantizes its shard by the amax of the whole weight, on which all agree first, and gathers 4.5 bits an element
(NVFP4) instead of 16. Where the shard ends between two tiles the codes are bit for bit those of the gathered weight.
The masters, their gradients and the optimizer do not know: only what the all-gather sends changes.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from nvfp4_train.numerics.quantize import Direction, QuantizedTensor, compute_amax, quantize
from nvfp4_train.numerics.spec import BLOCK_SIZE, CHUNK, GlobalScale, OperandSpec
from nvfp4_train.precision.arriving_weight import ArrivingWeight
from nvfp4_train.precision.experts import QuantizedExperts
from nvfp4_train.precision.linear import QuantizedLinear
from nvfp4_train.precision.operands import StoredOperand
from nvfp4_train.precision.position import RoundingPosition


def weight_gathers(model: nn.Module, *, num_shards: int) -> dict[str, str]:
    """Return, by the name of each Linear, how its weight is gathered: the format, or BF16 and why.

    Args:
        model: After the precision pass and the tensor-parallel plan; its weights are whole or DTensors.
        num_shards: Ranks that FSDP shards a weight over.
    """
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            problem = _problem(module, num_shards=num_shards)
            spec = module.precision.recipe.operands["fprop.w"]
            found[name] = spec.format.value if problem is None else f"bf16: {problem}"
        elif isinstance(module, QuantizedExperts):
            found[name] = "bf16: experts are gathered together"
    return found


def gather_quantized(model: nn.Module, *, group: dist.ProcessGroup, position: RoundingPosition) -> None:
    """Make every weight that can be gathered quantized so, in place.

    Args:
        model: After FSDP and materialized: PyTorch looks for the hooks on the local tensor of a shard.
        group: The ranks that share a weight.
        position: Of the precision pass; tells when weights changed.
    """
    agreement = _Agreement(group=group, position=position)
    linears = {
        id(module.weight): module
        for module in model.modules()
        if isinstance(module, QuantizedLinear) and _problem(module, num_shards=group.size()) is None
    }
    for fsdp_module in model.modules():
        if not isinstance(fsdp_module, FSDPModule):
            continue
        param_group = fsdp_module._get_fsdp_state()._fsdp_param_group
        for parameter in [] if param_group is None else param_group.fsdp_params:
            linear = linears.get(id(parameter.sharded_param))
            if linear is None:
                continue
            shard = _Shard(linear=linear, local=parameter._sharded_local_tensor, agreement=agreement)
            agreement.shards.append(shard)
            # The documented place of the hooks is the class of the local tensor; PyTorch 2.13 asks the instance, which
            # spares the masters a class of their own, and looks once, when it shards.
            shard.local.fsdp_pre_all_gather = shard.before_gather
            shard.local.fsdp_post_all_gather = shard.after_gather
            parameter._init_extensions()
            linear.receive_weight(ArrivingWeight(operand=shard.operand, whole=shard.whole))


def _problem(linear: QuantizedLinear, *, num_shards: int) -> str | None:
    recipe = linear.precision.recipe
    if recipe.weight_gather_problem is not None:
        return recipe.weight_gather_problem
    spec = recipe.operands["fprop.w"]
    tile = _tile_rows(spec)
    rows = _local_rows(linear.weight)
    if rows % (tile * num_shards):
        return f"{rows} rows are not a multiple of {tile} x {num_shards} shards"
    return None


def _tile_rows(spec: OperandSpec) -> int:
    """Return the rows that share a scale."""
    if spec.fp32_scale is GlobalScale.block_128:
        return CHUNK
    return BLOCK_SIZE[spec.block] if spec.is_tile else 1


def _local_rows(weight: Tensor) -> int:
    """Return the rows that FSDP shards: those of a tensor-parallel part."""
    if not isinstance(weight, DTensor):
        return weight.shape[0]
    rows = weight.shape[0]
    names = weight.device_mesh.mesh_dim_names or ()
    for axis, placement in enumerate(weight.placements):
        if placement.is_shard(0) and names[axis] == "tp":
            rows //= weight.device_mesh.size(axis)
    return rows


@dataclass
class _Agreement:
    """The amax of every weight, over all ranks; one reduction whenever the weights changed."""

    group: dist.ProcessGroup
    position: RoundingPosition
    shards: list["_Shard"] = field(default_factory=list)
    version: int | None = None

    def reach(self) -> None:
        """Bring the amax of every shard up to date; all ranks get here in the same gather."""
        if self.version == self.position.weight_version:
            return
        shards = [shard for shard in self.shards if shard.shares_amax]
        if shards:
            found = torch.cat([shard.own_amax() for shard in shards])
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
            for shard, amax in zip(shards, found.split(1), strict=True):
                shard.amax = shard.linear.reduce_amax("fprop.w", amax)
        self.version = self.position.weight_version


@dataclass
class _Shard:
    """What one rank holds of one weight, and what it gathers.

    Args:
        linear: Whose weight it is.
        local: The FP32 master, [rows / shards, columns].
        agreement: With the other ranks.
        amax: Of the whole weight, once there is an agreement.
        gathered: What the newest gather brought: codes, and such scales as the format has.
        shell: The values that the gathered parameter would have, until they are freed.
    """

    linear: QuantizedLinear
    local: Any
    agreement: _Agreement
    amax: Tensor | None = None
    gathered: tuple[Tensor, ...] = ()
    shell: Tensor | None = None

    @property
    def spec(self) -> OperandSpec:
        return self.linear.precision.recipe.operands["fprop.w"]

    @property
    def shares_amax(self) -> bool:
        """Whether one amax belongs to the whole weight."""
        return self.spec.has_amax and self.spec.fp32_scale is not GlobalScale.block_128

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the gathered weight."""
        return self.local.shape[0] * self.agreement.group.size(), self.local.shape[1]

    def own_amax(self) -> Tensor:
        return compute_amax(self._cast(), self.spec, direction=Direction.row)

    def before_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], None]:
        """FSDP's hook: what this rank contributes."""
        del mesh  # of the group that is known
        self.agreement.reach()
        packed = quantize(self._cast(), self.spec, direction=Direction.row, amax=self.amax)
        parts = (packed.codes, packed.block_scale, packed.amax)
        return tuple(part for part, is_sent in zip(parts, self._sent, strict=True) if is_sent), None

    def after_gather(
        self, gathered: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """FSDP's hook: take what all ranks contributed. What becomes a parameter has a shape and no values."""
        del metadata  # there is none
        self.gathered = gathered
        if out is not None:
            return None
        self.shell = torch.empty(self.shape, dtype=dtype, device=gathered[0].device)
        return self.shell, ()

    def operand(self) -> StoredOperand:
        """Return the quantized weight of the newest gather."""
        if self.shell is not None:
            self.shell.untyped_storage().resize_(0)
            self.shell = None
        brought = iter(self.gathered)
        codes, block_scale, amax = (next(brought) if is_sent else None for is_sent in self._sent)
        assert codes is not None
        if block_scale is None:
            block_scale = codes.new_empty(self.shape[0], 0)
        if amax is None:
            amax = self.amax if self.amax is not None else codes.new_empty(0, dtype=torch.float32)
        packed = QuantizedTensor(codes, block_scale, amax, self.spec, self.shape, torch.bfloat16)
        return StoredOperand.of_codes(packed, Direction.row)

    def whole(self) -> Tensor:
        """Gather the BF16 weight."""
        local = self._cast()
        whole = local.new_empty(self.shape)
        dist.all_gather_into_tensor(whole, local, group=self.agreement.group)
        return whole

    @property
    def _sent(self) -> tuple[bool, bool, bool]:
        """Whether codes, block scales and amax travel: scales that cover rows of one shard only do."""
        return True, bool(self.spec.block_size), self.spec.fp32_scale is GlobalScale.block_128

    @torch.no_grad()
    def _cast(self) -> Tensor:
        return self.local.to(torch.bfloat16)
