"""Collectives that autograd goes through, each the adjoint of another one.

    function           forward                        gradient
    gather             concatenate the ranks' parts   sum over ranks, split     (reduce-scatter)
    reduce_scatter     sum over ranks, split          concatenate               (all-gather)
    all_reduce         sum over ranks                 as it is
    copy_to_ranks      as it is                       sum over ranks            (all-reduce)
    gather_equal       concatenate the ranks' parts   own part
    split_equal        own part                       concatenate               (all-gather)
    all_to_all         exchange rows                  exchange back

Which one fits depends on what a rank's gradient is. `gather` and `copy_to_ranks` enter a region in which each rank
computes a part of the model: the gradients of their results are parts of a sum. `reduce_scatter` and `all_reduce` leave
it. `gather_equal` and `split_equal` are for values that all ranks use alike, whose gradients are equal on all.

Sums are taken in `sum_dtype` and returned in the dtype of the tensor.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# The operators below `torch.distributed`'s functions: they return new tensors, and compilers know them.
_ops = torch.ops._c10d_functional


def gather(x: Tensor, *, dim: int, group: dist.ProcessGroup, sum_dtype: torch.dtype) -> Tensor:
    """Return the parts of all ranks, concatenated along `dim`; the gradients of all ranks are summed and split."""
    return _Gather.apply(x, dim % x.ndim, group, sum_dtype)


def reduce_scatter(x: Tensor, *, dim: int, group: dist.ProcessGroup, sum_dtype: torch.dtype) -> Tensor:
    """Return this rank's part, along `dim`, of the sum over ranks; gradients are concatenated."""
    return _ReduceScatter.apply(x, dim % x.ndim, group, sum_dtype)


def all_reduce(x: Tensor, *, group: dist.ProcessGroup, sum_dtype: torch.dtype) -> Tensor:
    """Return the sum over ranks; its gradient, equal on all ranks, is that of each part."""
    return _AllReduce.apply(x, group, sum_dtype)


def copy_to_ranks(x: Tensor, *, group: dist.ProcessGroup, sum_dtype: torch.dtype) -> Tensor:
    """Return `x`, equal on all ranks, for a computation that each rank does a part of; gradients are summed."""
    return _CopyToRanks.apply(x, group, sum_dtype)


def gather_equal(x: Tensor, *, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return the parts of all ranks, concatenated along `dim`, for a use that is equal on all ranks."""
    return _GatherEqual.apply(x, dim % x.ndim, group)


def split_equal(x: Tensor, *, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part, along `dim`, of a tensor that is equal on all ranks; gradients are concatenated."""
    return _SplitEqual.apply(x, dim % x.ndim, group)


def all_to_all(x: Tensor, *, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send rows of `x` to the ranks of a group and return the rows that came back, by rank.

    Args:
        x: [sum(sent), ...], sorted by the rank that gets a row.
        sent: Rows for each rank.
        received: Rows from each rank.
        group: The ranks.

    Returns:
        [sum(received), ...].
    """
    return _AllToAll.apply(x, sent, received, group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup, sum_dtype: torch.dtype) -> Tensor:
        ctx.dim, ctx.group, ctx.sum_dtype = dim, group, sum_dtype
        return _concatenated(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _summed_part(grad, ctx.dim, ctx.group, ctx.sum_dtype), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup, sum_dtype: torch.dtype) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _summed_part(x, dim, group, sum_dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _concatenated(grad, ctx.dim, ctx.group), None, None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, sum_dtype: torch.dtype) -> Tensor:
        return _summed(x, group, sum_dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, sum_dtype: torch.dtype) -> Tensor:
        ctx.group, ctx.sum_dtype = group, sum_dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _summed(grad, ctx.group, ctx.sum_dtype), None, None


class _GatherEqual(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _concatenated(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _own_part(grad, ctx.dim, ctx.group), None, None


class _SplitEqual(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _own_part(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _concatenated(grad, ctx.dim, ctx.group), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchanged(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def _concatenated(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    # Ranks' parts come one below the other: along another dim they have to be moved there.
    parts = _wait(_ops.all_gather_into_tensor(x.movedim(dim, 0).contiguous(), group.size(), group.group_name))
    return parts.movedim(0, dim).contiguous()


def _summed(x: Tensor, group: dist.ProcessGroup, sum_dtype: torch.dtype) -> Tensor:
    return _wait(_ops.all_reduce(x.to(sum_dtype).contiguous(), "sum", group.group_name)).to(x.dtype)


def _summed_part(x: Tensor, dim: int, group: dist.ProcessGroup, sum_dtype: torch.dtype) -> Tensor:
    parts = x.to(sum_dtype).movedim(dim, 0).contiguous()
    part = _wait(_ops.reduce_scatter_tensor(parts, "sum", group.size(), group.group_name))
    return part.movedim(0, dim).to(x.dtype).contiguous()


def _own_part(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return x.chunk(group.size(), dim)[group.rank()].contiguous()


def _exchanged(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    return _wait(_ops.all_to_all_single(x.contiguous(), received, sent, group.group_name))


def _wait(x: Tensor) -> Tensor:
    return _ops.wait_tensor(x)
