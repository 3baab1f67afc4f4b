"""Collectives that autograd goes through, each the adjoint of another one.

    function           forward                        gradient
    gather             concatenate the ranks' parts   sum over ranks, split     (reduce-scatter)
    reduce_scatter     sum over ranks, split          concatenate               (all-gather)
    all_reduce         sum over ranks                 as it is
    copy_to_ranks      as it is                       sum over ranks            (all-reduce)
    gather_equal       concatenate the ranks' parts   own part
    split_equal        own part                       concatenate               (all-gather)
    all_to_all         exchange rows                  exchange back
    with_preceding     prepend the neighbour's last   add what the next rank returns

Which one fits depends on what a rank's gradient is. `gather` and `copy_to_ranks` enter a region in which each rank
computes a part of the model: the gradients of their results are parts of a sum. `reduce_scatter` and `all_reduce` leave
it. `gather_equal` and `split_equal` are for values that all ranks use alike, whose gradients are equal on all.

Sums are taken in `sum_dtype` and returned in the dtype of the tensor, or in the `dtype` that is asked for.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# The operators below `torch.distributed`'s functions: they return new tensors, and compilers know them.
_ops = torch.ops._c10d_functional


def gather(
    x: Tensor, *, dim: int, group: dist.ProcessGroup, sum_dtype: torch.dtype, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the parts of all ranks, concatenated along `dim`; the gradients of all ranks are summed and split."""
    return _Gather.apply(x, dim % x.ndim, group, (sum_dtype, dtype or x.dtype))


def reduce_scatter(
    x: Tensor, *, dim: int, group: dist.ProcessGroup, sum_dtype: torch.dtype, dtype: torch.dtype | None = None
) -> Tensor:
    """Return this rank's part, along `dim`, of the sum over ranks; gradients are concatenated."""
    return _ReduceScatter.apply(x, dim % x.ndim, group, (sum_dtype, dtype or x.dtype))


def all_reduce(
    x: Tensor, *, group: dist.ProcessGroup, sum_dtype: torch.dtype, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the sum over ranks; its gradient, equal on all ranks, is that of each part."""
    return _AllReduce.apply(x, group, sum_dtype, dtype or x.dtype)


def copy_to_ranks(
    x: Tensor, *, group: dist.ProcessGroup, sum_dtype: torch.dtype, dtype: torch.dtype | None = None
) -> Tensor:
    """Return `x`, equal on all ranks, for a computation that each rank does a part of; gradients are summed."""
    return _CopyToRanks.apply(x, group, sum_dtype, dtype or x.dtype)


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


def mean_over_ranks(x: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """Return the mean of `x` over ranks, taken in its dtype; for use inside functions with gradients of their own."""
    return _summed(x, group, x.dtype) / group.size()


def with_preceding(x: Tensor, *, dim: int, count: int, group: dist.ProcessGroup, sum_dtype: torch.dtype) -> Tensor:
    """Return the last places, along `dim`, of the rank before, and then `x`; zeros before the first rank.

    Only neighbours talk. The gradients of what was handed to the next rank come back and are added in `sum_dtype`.

    Args:
        x: As large on every rank.
        dim: Along which the ranks' parts follow each other.
        count: Places of the rank before, at most those of `x`.
        group: The ranks.
        sum_dtype: In which gradients are added up.
    """
    return _WithPreceding.apply(x, (dim % x.ndim, count), group, sum_dtype)


# Dtypes in which functions add up, and of their results.
_Dtypes = tuple[torch.dtype, torch.dtype]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup, dtypes: _Dtypes) -> Tensor:
        ctx.dim, ctx.group, ctx.dtypes = dim, group, (dtypes[0], x.dtype)
        return _concatenated(x, dim, group).to(dtypes[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        sum_dtype, dtype = ctx.dtypes
        return _summed_part(grad, ctx.dim, ctx.group, sum_dtype).to(dtype), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup, dtypes: _Dtypes) -> Tensor:
        ctx.dim, ctx.group, ctx.dtype = dim, group, x.dtype
        return _summed_part(x, dim, group, dtypes[0]).to(dtypes[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _concatenated(grad, ctx.dim, ctx.group).to(ctx.dtype), None, None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, sum_dtype: torch.dtype, dtype: torch.dtype) -> Tensor:
        ctx.dtype = x.dtype
        return _summed(x, group, sum_dtype).to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad.to(ctx.dtype), None, None, None


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, sum_dtype: torch.dtype, dtype: torch.dtype) -> Tensor:
        ctx.group, ctx.sum_dtype, ctx.dtype = group, sum_dtype, x.dtype
        return x.to(dtype) if dtype is not x.dtype else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _summed(grad, ctx.group, ctx.sum_dtype).to(ctx.dtype), None, None, None


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


class _WithPreceding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, place: tuple[int, int], group: dist.ProcessGroup, sum_dtype: torch.dtype
    ) -> Tensor:
        ctx.place, ctx.group, ctx.sum_dtype = place, group, sum_dtype
        dim, count = place
        parts = x.movedim(dim, 0)
        before = _from_neighbour(parts[len(parts) - count :], group, step=1)
        return torch.cat((before, parts)).movedim(0, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        dim, count = ctx.place
        parts = grad.movedim(dim, 0)
        own = parts[count:].to(ctx.sum_dtype, copy=True)
        own[len(own) - count :] += _from_neighbour(parts[:count], ctx.group, step=-1)
        return own.to(grad.dtype).movedim(0, dim).contiguous(), None, None, None


def _from_neighbour(x: Tensor, group: dist.ProcessGroup, *, step: int) -> Tensor:
    """Send `x` `step` ranks on and return what comes from as many ranks back, zeros at the end of the line."""
    rank, size = group.rank(), group.size()
    sent, received = ([len(x) if other == rank + by else 0 for other in range(size)] for by in (step, -step))
    arrived = _exchanged(x if sum(sent) else x[:0], sent, received, group)
    return arrived if sum(received) else torch.zeros_like(x)


def _concatenated(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    # Ranks' parts come one below the other: along another dim they have to be moved there.
    parts = _wait(_ops.all_gather_into_tensor(x.movedim(dim, 0).contiguous(), group.size(), group.group_name))
    return parts.movedim(0, dim).contiguous()


def _summed(x: Tensor, group: dist.ProcessGroup, sum_dtype: torch.dtype) -> Tensor:
    return _wait(_ops.all_reduce(x.to(sum_dtype).contiguous(), "sum", group.group_name))


def _summed_part(x: Tensor, dim: int, group: dist.ProcessGroup, sum_dtype: torch.dtype) -> Tensor:
    parts = x.to(sum_dtype).movedim(dim, 0).contiguous()
    part = _wait(_ops.reduce_scatter_tensor(parts, "sum", group.size(), group.group_name))
    return part.movedim(0, dim).contiguous()


def _own_part(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return x.chunk(group.size(), dim)[group.rank()].contiguous()


def _exchanged(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    return _wait(_ops.all_to_all_single(x.contiguous(), received, sent, group.group_name))


def _wait(x: Tensor) -> Tensor:
    return _ops.wait_tensor(x)
