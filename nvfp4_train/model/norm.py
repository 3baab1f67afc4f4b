"""Root-mean-square norms, computed in FP32 whatever the activation dtype.

Both are written out with their gradients: autograd would keep several FP32 tensors of the size of the activation where
these keep none.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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

    Source: Mamba-2, https://arxiv.org/abs/2405.21060, with the gate before the norm as in Megatron-LM and NemotronH.
    """

    keep_fp32 = True

    def __init__(self, width: int, *, group_width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.group_width = group_width
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Gate and normalize [..., width]; returns the dtype of ``x``."""
        return _GatedRMSNorm.apply(x, gate, self.weight.unflatten(0, (-1, self.group_width)), self.eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        precise = x.to(weight.dtype)
        inverse = _inverse_rms(precise, eps=eps)
        ctx.save_for_backward(x, weight, inverse)
        return (precise * inverse).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        grad_y, normed = grad_y.to(weight.dtype), x.to(weight.dtype) * inverse
        grad_x = _grad_of_normalize(grad_y * weight, normed=normed, inverse=inverse)
        return grad_x.to(x.dtype), _sum_over_tokens(grad_y * normed), None


class _GatedRMSNorm(torch.autograd.Function):
    """The weight is [groups, channels of a group] and says where the groups are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        gated = (F.silu(gate.to(weight.dtype)) * x.to(weight.dtype)).unflatten(-1, weight.shape)
        inverse = _inverse_rms(gated, eps=eps)
        ctx.save_for_backward(x, gate, weight, inverse)
        return (gated * inverse).mul_(weight).flatten(-2).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, gate, weight, inverse = ctx.saved_tensors
        precise, precise_gate = x.to(weight.dtype), gate.to(weight.dtype)
        opened = F.silu(precise_gate)
        grad_y = grad_y.to(weight.dtype).unflatten(-1, weight.shape)
        normed = (opened * precise).unflatten(-1, weight.shape) * inverse
        grad_gated = _grad_of_normalize(grad_y * weight, normed=normed, inverse=inverse).flatten(-2)
        grad_gate = torch.ops.aten.silu_backward(grad_gated * precise, precise_gate)
        grad_weight = _sum_over_tokens((grad_y * normed).flatten(-2)).view_as(weight)
        return opened.mul_(grad_gated).to(x.dtype), grad_gate.to(gate.dtype), grad_weight, None


def _inverse_rms(x: Tensor, *, eps: float) -> Tensor:
    return x.square().mean(dim=-1, keepdim=True).add_(eps).rsqrt_()


def _grad_of_normalize(grad_normed: Tensor, *, normed: Tensor, inverse: Tensor) -> Tensor:
    """Backward of ``normed = x * inverse``, where ``inverse`` depends on all of the last dim of x."""
    along = (grad_normed * normed).mean(dim=-1, keepdim=True)
    return torch.addcmul(grad_normed, normed, along, value=-1).mul_(inverse)


def _sum_over_tokens(x: Tensor) -> Tensor:
    return x.flatten(0, -2).sum(dim=0)
