"""Tensor parallelism: the ranks of a group share the heads and the columns of every layer.

Each residual block is a region between two collectives. At its entrance every rank gets all tokens, in it every rank
computes with its own heads, columns or groups, and at its exit the parts, which are sums over other columns each, are
added up. With sequence parallelism the ranks keep an equal part of the tokens each between the regions: the entrance
gathers, the exit reduces and scatters. Without it all ranks keep all tokens.

    module                     is split along       and holds
    qkv_proj, in_proj          output features      whole key-value heads with their queries, whole groups
    up_proj, gate_proj         output features      columns of the MLP, of shared and of each routed expert
    conv1d, scan, gated norm   channels, heads      those of the groups
    o_proj, out_proj, down_proj, fc2_latent_proj, eh_proj    input features
    fc1_latent_proj            output features      its result is gathered for the experts
    embedding, lm_head         vocabulary           see vocabulary.py
    norms, router              nothing

Parameters are DTensors and modules compute with their local parts. In a region the gradients of what is not split are
parts of a sum over the ranks (Partial), which FSDP takes before it reduces over the data ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from nvfp4_train.config.model import NormGroup
from nvfp4_train.config.parallel import ParallelConfig, ReduceDtype
from nvfp4_train.model.attention import Attention
from nvfp4_train.model.block import Block
from nvfp4_train.model.documents import Documents
from nvfp4_train.model.mamba2 import Mamba2
from nvfp4_train.model.mlp import Mlp
from nvfp4_train.model.moe import Moe, Penalized
from nvfp4_train.model.mtp import MtpDepth
from nvfp4_train.model.part import ParameterPart
from nvfp4_train.parallel.amax import agree_on_amax
from nvfp4_train.parallel.collectives import (
    all_reduce,
    copy_to_ranks,
    gather,
    gather_equal,
    mean_over_ranks,
    reduce_scatter,
    split_equal,
)
from nvfp4_train.parallel.mesh import Mesh
from nvfp4_train.precision.experts import QuantizedExperts
from nvfp4_train.precision.linear import QuantizedLinear

SUM_DTYPE = {ReduceDtype.bf16: torch.bfloat16, ReduceDtype.fp32: torch.float32}
_SEQUENCE = 1  # dim of the tokens in [B, S, D]


@dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """The ranks that share a layer, and how they pass tokens on.

    Args:
        dense: Mesh of one axis, for parameters that every token meets.
        experts: Mesh of the axes ep and tp, for routed experts.
        keeps_parts: Whether each rank keeps a part of the tokens between regions (sequence parallelism).
        sum_dtype: In which parts are added up. Where it is wider than what is added, GEMMs hand over their FP32 results
            and not a rounding of them.
        compute_dtype: Of activations.
    """

    dense: DeviceMesh
    experts: DeviceMesh
    keeps_parts: bool
    sum_dtype: torch.dtype
    compute_dtype: torch.dtype

    @classmethod
    def of(cls, cfg: ParallelConfig, mesh: Mesh, *, compute_dtype: torch.dtype) -> "TensorParallel":
        """Return what the configuration says about the axis `tp` of a mesh."""
        return cls(
            dense=mesh.dense["tp"],
            experts=mesh.expert["ep", "tp"],
            keeps_parts=cfg.sequence_parallel,
            sum_dtype=SUM_DTYPE[cfg.tp_reduce_dtype],
            compute_dtype=compute_dtype,
        )

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks."""
        return self.dense.get_group()

    @property
    def rank(self) -> int:
        """Index of this rank among them."""
        return self.dense.get_local_rank()

    @property
    def degree(self) -> int:
        """Number of ranks."""
        return self.dense.size()

    @property
    def part_dtype(self) -> torch.dtype:
        """Dtype of results that are still to be added up."""
        return torch.promote_types(self.sum_dtype, self.compute_dtype)

    def enter(self, h: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """Return all tokens [B, S, D] for a region of which each rank computes a part.

        Args:
            h: The tokens that this rank keeps.
            dtype: That the gradients have that are added up; the tokens have it then, too. None: that of `h`.
        """
        options: dict[str, Any] = {"group": self.group, "sum_dtype": self.sum_dtype, "dtype": dtype}
        return gather(h, dim=_SEQUENCE, **options) if self.keeps_parts else copy_to_ranks(h, **options)

    def leave(self, h: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """Add up what the ranks computed of [B, S, D], and return the tokens that this rank keeps, in `dtype`."""
        options: dict[str, Any] = {"group": self.group, "sum_dtype": self.sum_dtype, "dtype": dtype}
        return reduce_scatter(h, dim=_SEQUENCE, **options) if self.keeps_parts else all_reduce(h, **options)

    def own_tokens(self, h: Tensor) -> Tensor:
        """Return the tokens of [B, S, D] that this rank keeps; its gradient is that of those tokens alone."""
        return h.chunk(self.degree, dim=_SEQUENCE)[self.rank] if self.keeps_parts else h


def split_block(block: Block, tp: TensorParallel) -> None:
    """Spread a residual block over the ranks, in place; its quantized Linears agree on every amax."""
    keep_norm(block.norm, tp)
    match block.mixer:
        case Attention():
            _split_attention(block.mixer, tp)
        case Mamba2():
            _split_mamba(block.mixer, tp)
        case Mlp():
            _split_mlp(block.mixer, tp)
        case Moe() if tp.part_dtype is not tp.compute_dtype:
            _split_moe_exactly(block.mixer, tp)
            _wrap(block.mixer, partial(_mix_whole_tokens, tp))
            return
        case Moe():
            _split_moe(block.mixer, tp)
    _wrap(block.mixer, partial(_mix_in_region, tp))


def split_mtp(depth: MtpDepth, tp: TensorParallel) -> None:
    """Spread a depth of multi-token prediction, without its blocks, over the ranks; in place."""
    for norm in (depth.enorm, depth.hnorm, depth.final_norm):
        keep_norm(norm, tp)
    split_inputs(depth.eh_proj, tp)
    _wrap(depth.eh_proj, partial(_project_in_region, tp))


def keep_norm(norm: nn.Module, tp: TensorParallel) -> None:
    """Hold a norm of the residual stream on every rank; where ranks keep parts of the tokens, so are its gradients."""
    hold_parts(norm, tp.dense, Replicate(), gradient=Partial() if tp.keeps_parts else Replicate())


def split_outputs(linear: nn.Module, tp: TensorParallel) -> None:
    """Let each rank compute its own output features of a quantized Linear."""
    assert isinstance(linear, QuantizedLinear)
    for name, _ in list(linear.named_parameters()):
        _distribute(linear, name, tp.dense, (Shard(0),))
    linear.out_features //= tp.degree
    linear.row_offset = tp.rank * linear.out_features
    linear.output_dtype = tp.compute_dtype
    linear.part = DTENSOR_PART
    agree_on_amax(linear, spread="outputs", group=tp.group)


def split_inputs(linear: nn.Module, tp: TensorParallel) -> None:
    """Let each rank multiply its own input features in a quantized Linear, whose results are still to be added up."""
    assert isinstance(linear, QuantizedLinear)
    _distribute(linear, "weight", tp.dense, (Shard(1),))
    if linear.bias is not None:
        _distribute(linear, "bias", tp.dense, (Replicate(),))
        linear.adds_bias = tp.rank == 0
    linear.in_features //= tp.degree
    linear.column_offset = tp.rank * linear.in_features
    linear.output_dtype = tp.part_dtype
    linear.part = DTENSOR_PART
    agree_on_amax(linear, spread="inputs", group=tp.group)


def hold_parts(module: nn.Module, mesh: DeviceMesh, placement: Placement, *, gradient: Placement | None = None) -> None:
    """Spread a small module's own parameters and let its forward see their local parts.

    Args:
        module: Its gradients are autograd's, FP32 as its parameters.
        mesh: One axis.
        placement: Of each parameter.
        gradient: Of the local gradients; None: that of the parameters.
    """
    for name, _ in list(module.named_parameters(recurse=False)):
        _distribute(module, name, mesh, (placement,))
    _wrap(module, partial(_with_local_parameters, module, gradient or placement))


def _split_attention(attention: Attention, tp: TensorParallel) -> None:
    split_outputs(attention.qkv_proj, tp)
    for norm in (attention.q_norm, attention.k_norm):
        if norm is not None:
            hold_parts(norm, tp.dense, Replicate(), gradient=Partial())  # each rank norms its own heads
    split_inputs(attention.o_proj, tp)


def _split_mamba(mamba: Mamba2, tp: TensorParallel) -> None:
    split_outputs(mamba.in_proj, tp)
    for module in (mamba.conv1d, mamba.scan, mamba.norm):
        hold_parts(module, tp.dense, Shard(0))
    if mamba.cfg.norm_group is NormGroup.whole:
        mamba.norm.group_width //= tp.degree
        mamba.norm.mean_over_parts = partial(mean_over_ranks, group=tp.group)
    split_inputs(mamba.out_proj, tp)


def _split_mlp(mlp: Mlp, tp: TensorParallel) -> None:
    for linear in (mlp.gate_proj, mlp.up_proj):
        if linear is not None:
            split_outputs(linear, tp)
    split_inputs(mlp.down_proj, tp)


def _split_moe(moe: Moe, tp: TensorParallel) -> None:
    hold_parts(moe.router, tp.dense, Replicate(), gradient=Partial())
    for grouped in (moe.experts.gate_proj, moe.experts.up_proj):
        if grouped is not None:
            _split_experts(grouped, tp, spread="outputs")
    _split_experts(moe.experts.down_proj, tp, spread="inputs")
    if moe.fc1_latent_proj is not None and moe.fc2_latent_proj is not None:
        columns: dict[str, Any] = {
            "dim": -1, "group": tp.group, "sum_dtype": tp.sum_dtype, "dtype": tp.compute_dtype
        }  # fmt: skip
        split_outputs(moe.fc1_latent_proj, tp)
        _wrap(moe.fc1_latent_proj, partial(_around, _as_it_is, partial(gather, **columns)))
        _wrap(moe.experts, partial(_around, _as_it_is, partial(reduce_scatter, **columns)))
        split_inputs(moe.fc2_latent_proj, tp)
    if moe.shared_experts is not None:
        _split_mlp(moe.shared_experts, tp)


def _split_moe_exactly(moe: Moe, tp: TensorParallel) -> None:
    """Split like `_split_moe`, but add up after each layer, so that every sum is rounded where one process rounds it.

    What enters and leaves a layer is then equal on all ranks, and so are gradients; what each expert returns is summed
    before it is combined, which is top_k times as much. For sums in FP32, whose point is to be those of one process.
    """
    hold_parts(moe.router, tp.dense, Replicate())
    copy = partial(copy_to_ranks, group=tp.group, sum_dtype=tp.sum_dtype, dtype=tp.part_dtype)
    add = partial(all_reduce, group=tp.group, sum_dtype=tp.sum_dtype, dtype=tp.compute_dtype)
    for grouped in (moe.experts.gate_proj, moe.experts.up_proj):
        if grouped is not None:
            _split_experts(grouped, tp, spread="outputs")
            _wrap(grouped, partial(_around, copy, _as_it_is))
    _split_experts(moe.experts.down_proj, tp, spread="inputs")
    _wrap(moe.experts.down_proj, partial(_around, _as_it_is, add))
    if moe.fc1_latent_proj is not None and moe.fc2_latent_proj is not None:
        split_outputs(moe.fc1_latent_proj, tp)
        _wrap(moe.fc1_latent_proj, partial(_around, copy, partial(gather_equal, dim=-1, group=tp.group)))
        split_inputs(moe.fc2_latent_proj, tp)
        _wrap(moe.fc2_latent_proj, partial(_around, partial(split_equal, dim=-1, group=tp.group), add))
    if moe.shared_experts is not None:
        _split_mlp(moe.shared_experts, tp)
        _wrap(moe.shared_experts, partial(_around, copy, add))


def _split_experts(grouped: nn.Module, tp: TensorParallel, *, spread: str) -> None:
    """Split the output or the input features of every expert's Linear; see `split_outputs` and `split_inputs`."""
    assert isinstance(grouped, QuantizedExperts)
    _distribute(grouped, "weight", tp.experts, (Shard(0), Shard(1 if spread == "outputs" else 2)))
    if spread == "outputs":
        grouped.out_features //= tp.degree
        grouped.row_offset = tp.rank * grouped.out_features
        grouped.output_dtype = tp.compute_dtype
    else:
        grouped.in_features //= tp.degree
        grouped.column_offset = tp.rank * grouped.in_features
        grouped.output_dtype = tp.part_dtype
    grouped.part = DTENSOR_PART
    agree_on_amax(grouped, spread=spread, group=tp.group)


def _mix_in_region(tp: TensorParallel, mix: Callable[..., Any], h: Tensor, documents: Documents) -> Tensor | Penalized:
    mixed = mix(tp.enter(h, dtype=tp.part_dtype), documents)
    if not isinstance(mixed, Penalized):
        return tp.leave(mixed, dtype=tp.compute_dtype)
    # All ranks compute the same penalty, and gradients in a region are added up: one rank's is the whole.
    penalty = mixed.penalty if tp.rank == 0 else mixed.penalty.detach()
    return Penalized(tp.leave(mixed.value, dtype=tp.compute_dtype), penalty)


def _mix_whole_tokens(
    tp: TensorParallel, mix: Callable[..., Any], h: Tensor, documents: Documents
) -> Tensor | Penalized:
    """Mix tokens that are equal on all ranks, before and after."""
    if not tp.keeps_parts:
        return mix(h, documents)
    mixed = mix(gather_equal(h, dim=_SEQUENCE, group=tp.group), documents)
    own = partial(split_equal, dim=_SEQUENCE, group=tp.group)
    return Penalized(own(mixed.value), mixed.penalty) if isinstance(mixed, Penalized) else own(mixed)


def _project_in_region(tp: TensorParallel, project: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return tp.leave(project(tp.enter(x).chunk(tp.degree, dim=-1)[tp.rank]), dtype=tp.compute_dtype)


def _around(
    before: Callable[[Tensor], Tensor],
    after: Callable[[Tensor], Tensor],
    forward: Callable[..., Tensor],
    x: Tensor,
    *args: Any,
) -> Tensor:
    return after(forward(before(x), *args))


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _with_local_parameters(
    module: nn.Module, gradient: Placement, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    parameters = {name: cast(DTensor, parameter) for name, parameter in module.named_parameters(recurse=False)}
    parts = {name: parameter.to_local(grad_placements=[gradient]) for name, parameter in parameters.items()}
    attributes = vars(module)  # Python looks here before it asks a module for its parameters
    attributes.update(parts)
    try:
        return forward(*args, **kwargs)
    finally:
        for name in parts:
            del attributes[name]


def _wrap(module: nn.Module, around: Callable[..., Any]) -> None:
    """Call `around` with a module's forward and its arguments in place of the forward."""
    module.forward = partial(around, module.forward)


def _distribute(module: nn.Module, name: str, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> None:
    parameter = getattr(module, name)
    # Without a source rank nothing is sent: values come later, and are the same everywhere.
    spread = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
    module.register_parameter(name, nn.Parameter(spread, requires_grad=parameter.requires_grad))


def _gradient_of(parameter: Tensor) -> Callable[[Tensor], Tensor]:
    spread = cast(DTensor, parameter)
    mesh, placements = spread.device_mesh, spread.placements
    return lambda gradient: DTensor.from_local(gradient, mesh, placements, run_check=False)


DTENSOR_PART = ParameterPart(local=lambda parameter: cast(DTensor, parameter).to_local(), gradient=_gradient_of)
