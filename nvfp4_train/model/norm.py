"""Root-mean-square norms, computed in FP32 whatever the activation dtype.

Both are written out with their gradients: autograd would keep several FP32 tensors of the size of the activation where
these keep none. On a CPU a kernel makes one pass of it.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nvfp4_train.model.kernels import norm as _kernels  # noqa: F401 - makes the ops
from nvfp4_train.model.kernels.program import is_fused


class RMSNorm(nn.Module):
    """Scale each vector to unit mean square, then by a learned weight."""

    keep_fp32 = True

    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [..., width]; returns the dtype of ``x``."""
        return _RMSNorm.apply(x, self.weight, self.eps)


class GatedRMSNorm(nn.Module):
    """Gate, then normalize: ``rms_norm(x * silu(gate)) * weight``, the mean square taken over groups of channels.

    Args:
        width: Channels.
        group_width: Channels that share one mean square; ``width`` for a norm over everything.
        eps: Added to the mean square.

    Attributes:
        group_width: Of the channels held here.
        mean_over_parts: From a mean over channels held here, FP32, to the mean over as many of each holder of other
            channels of the same groups; replaced, with ``group_width``, where there are such. No gradient: the norm
            takes it of both its sums, of squares and, in backward, of gradients along the normed vector.

    Source: Mamba-2, https://arxiv.org/abs/2405.21060, with the gate before the norm as in Megatron-LM and NemotronH.
    """

    keep_fp32 = True

    def __init__(self, width: int, *, group_width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.group_width = group_width
        self.mean_over_parts: Callable[[Tensor], Tensor] = _keep
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Gate and normalize.

        Args:
            x: [..., width], or the channels in groups [..., G, width / G].
            gate: The same shape.

        Returns:
            The shape and dtype of ``x``.
        """
        weight = self.weight.unflatten(0, (-1, self.group_width))
        return _GatedRMSNorm.apply(x, gate, weight, (self.eps, self.mean_over_parts))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.fused = _is_fused(x, weight)
        if ctx.fused:
            y, inverse = torch.ops.nvfp4_train.norm_forward(x, None, weight, group_width=len(weight), eps=eps)
        else:
            precise = x.to(weight.dtype)
            inverse = _inverse_rms(precise, eps=eps, mean_over_parts=_keep)
            y = (precise * inverse).mul_(weight).to(x.dtype)
        ctx.save_for_backward(x, weight, inverse)
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        if ctx.fused:
            width = len(weight)
            grads = torch.ops.nvfp4_train.norm_backward(grad_y, x, None, weight, inverse, group_width=width)
            return grads[0], grads[2], None
        grad_y, normed = grad_y.to(weight.dtype), x.to(weight.dtype) * inverse
        grad_x = _grad_of_normalize(grad_y * weight, normed=normed, inverse=inverse, mean_over_parts=_keep)
        return grad_x.to(x.dtype), _sum_over_tokens(grad_y * normed), None


class _GatedRMSNorm(torch.autograd.Function):
    """The weight is [groups, channels of a group] and says which channels share a mean square.

    The kernel has no place for an exchange between the sum of squares and its use.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, scale: tuple[float, Callable[[Tensor], Tensor]]
    ) -> Tensor:
        eps, mean_over_parts = scale
        ctx.mean_over_parts = mean_over_parts
        ctx.fused = mean_over_parts is _keep and _is_fused(x, weight) and gate.dtype is x.dtype
        if ctx.fused:
            ops, width = torch.ops.nvfp4_train, weight.shape[1]
            y, inverse = ops.norm_forward(x, gate, weight.flatten(), group_width=width, eps=eps)
        else:
            gated = (F.silu(gate.to(weight.dtype)) * x.to(weight.dtype)).reshape(-1, *weight.shape)
            inverse = _inverse_rms(gated, eps=eps, mean_over_parts=mean_over_parts)
            y = (gated * inverse).mul_(weight).view(x.shape).to(x.dtype)
        ctx.save_for_backward(x, gate, weight, inverse)
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, gate, weight, inverse = ctx.saved_tensors
        if ctx.fused:
            ops, width = torch.ops.nvfp4_train, weight.shape[1]
            grads = ops.norm_backward(grad_y, x, gate, weight.flatten(), inverse, group_width=width)
            return grads[0], grads[1], grads[2].view_as(weight), None
        precise, precise_gate = x.to(weight.dtype), gate.to(weight.dtype)
        opened = F.silu(precise_gate)
        grad_y = grad_y.to(weight.dtype).reshape(-1, *weight.shape)
        normed = (opened * precise).reshape(-1, *weight.shape) * inverse
        grad_gated = _grad_of_normalize(
            grad_y * weight, normed=normed, inverse=inverse, mean_over_parts=ctx.mean_over_parts
        ).view(x.shape)
        grad_gate = torch.ops.aten.silu_backward(grad_gated * precise, precise_gate)
        grad_weight = (grad_y * normed).sum(dim=0)
        return opened.mul_(grad_gated).to(x.dtype), grad_gate.to(gate.dtype), grad_weight, None


def _is_fused(x: Tensor, weight: Tensor) -> bool:
    return weight.dtype is torch.float32 and is_fused(x)


def _keep(mean: Tensor) -> Tensor:
    return mean


def _inverse_rms(x: Tensor, *, eps: float, mean_over_parts: Callable[[Tensor], Tensor]) -> Tensor:
    return mean_over_parts(x.square().mean(dim=-1, keepdim=True)).add_(eps).rsqrt_()


def _grad_of_normalize(
    grad_normed: Tensor, *, normed: Tensor, inverse: Tensor, mean_over_parts: Callable[[Tensor], Tensor]
) -> Tensor:
    """Backward of ``normed = x * inverse``, where ``inverse`` depends on all of the last dim of x, of all parts."""
    along = mean_over_parts((grad_normed * normed).mean(dim=-1, keepdim=True))
    return torch.addcmul(grad_normed, normed, along, value=-1).mul_(inverse)


def _sum_over_tokens(x: Tensor) -> Tensor:
    return x.flatten(0, -2).sum(dim=0)
