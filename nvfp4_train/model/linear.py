"""The Linears that every GEMM of the model goes through."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nvfp4_train.model.part import WHOLE, ParameterPart

# Takes, in backward, the weight that the forward saw and what computes its gradient, to do so later.
DeferGradient = Callable[[Tensor, Callable[[], Tensor]], None]


class Linear(nn.Linear):
    """An ``nn.Linear`` whose FP32 master weight is cast to the activation's dtype in forward.

    The precision pass replaces instances by their quantized counterpart, under the same parameter names.

    Attributes:
        group_rows: Output features that belong together, of which there are several such groups; 0: none do.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False, group_rows: int = 0) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.group_rows = group_rows

    def forward(self, x: Tensor) -> Tensor:
        """Multiply [..., in_features] by the transposed weight and add the bias, in the dtype of ``x``."""
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class GroupedLinear(nn.Module):
    """One Linear without bias per expert: each token goes through the Linear of the expert that it was sent to.

    The precision pass replaces instances by their quantized counterpart, under the same parameter name.

    Args:
        num_experts: Linears.
        in_features: Width of a token.
        out_features: Width of the result.
        uses_per_token: Experts that each token of the model is sent to; for counting FLOPs.
    """

    def __init__(self, num_experts: int, in_features: int, out_features: int, *, uses_per_token: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.in_features = in_features
        self.out_features = out_features
        self.uses_per_token = uses_per_token
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """Multiply each token by the transposed weight of its expert, in the dtype of ``x``.

        Args:
            x: [T, in_features], sorted by expert.
            ends: [num_experts] int32, the end of each expert's tokens; the last one is T.

        Returns:
            [T, out_features].
        """
        return grouped_linear(x, self.weight, ends)

    def extra_repr(self) -> str:
        """Add the shape to what ``print(model)`` shows."""
        return f"{self.num_experts} x ({self.in_features} -> {self.out_features})"


def grouped_linear(
    x: Tensor, weight: Tensor, ends: Tensor, *, part: ParameterPart = WHOLE, defer: DeferGradient | None = None
) -> Tensor:
    """Return ``x[i] @ weight[e].T`` for every token i of every expert e; see ``GroupedLinear``.

    The gradient of ``weight``, of which ``part`` is held here, is FP32 for FP32 and BF16 weights; with ``defer`` the
    backward leaves it to that.
    """
    if weight.requires_grad and weight.dtype is torch.bfloat16:  # as FSDP2 hands it out
        weight.grad_dtype = torch.float32
    return _GroupedLinear.apply(x, weight, ends, (part, defer))


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, options: tuple[ParameterPart, DeferGradient | None]
    ) -> Tensor:
        part, defer = options
        local = part.local(weight)
        ctx.save_for_backward(x, local, ends)
        ctx.gradient = part.gradient(weight)
        ctx.parameter = None if defer is None else weight
        ctx.defer = defer
        return _grouped_mm(x, local.to(x.dtype).mT, ends)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, ends = ctx.saved_tensors
        grad_y = grad_y.contiguous()
        grad_x = _grouped_mm(grad_y, weight.to(x.dtype), ends) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            compute = partial(_gradient, ctx.gradient, grad_y, x, ends)
            grad_weight = now_or_later(compute, ctx.parameter, defer=ctx.defer)
        return grad_x, grad_weight, None, None


def _gradient(of_part: Callable[[Tensor], Tensor], grad_y: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return of_part(_grouped_outer(grad_y, x, ends))


def now_or_later(compute: Callable[[], Tensor], weight: Tensor, *, defer: DeferGradient | None) -> Tensor | None:
    """Return the gradient of ``weight``, or leave it to ``defer`` and return none."""
    if defer is None:
        return compute()
    defer(weight, compute)
    return None


def _grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """[T, K] x [E, K, N] -> [T, N]."""
    if x.dtype is torch.float64:
        parts = torch.tensor_split(x, ends[:-1].long())  # PyTorch 2.13 groups no FP64
        return torch.cat([part @ matrix for part, matrix in zip(parts, weight, strict=True)])
    rest_k, rest_n = _padding(x, weight.shape[1]), _padding(x, weight.shape[2])
    if rest_k or rest_n:
        x, weight = F.pad(x, (0, rest_k)), F.pad(weight, (0, rest_n, 0, rest_k))
    product = F.grouped_mm(x, weight, offs=ends)
    return product[:, : product.shape[1] - rest_n].contiguous() if rest_n else product


def _grouped_outer(grad_y: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """[T, N], [T, K] -> [E, N, K], summed over the tokens of each expert, in FP32 or the wider dtype of ``x``."""
    if x.dtype is torch.float64:
        pairs = zip(torch.tensor_split(grad_y, ends[:-1].long()), torch.tensor_split(x, ends[:-1].long()), strict=True)
        return torch.stack([dy.T @ part for dy, part in pairs])
    if x.device.type == "cpu":  # products of BF16 are exact in FP32; on CUDA only BF16 comes back from BF16
        grad_y, x = grad_y.float(), x.float()
    width_n, width_k = grad_y.shape[1], x.shape[1]
    grad_y, x = (F.pad(t, (0, rest)) if (rest := _padding(t, t.shape[1])) else t for t in (grad_y, x))
    return F.grouped_mm(grad_y.mT, x, offs=ends)[:, :width_n, :width_k].float()


def _padding(like: Tensor, width: int) -> int:
    """Return how many zeros a width needs so that rows of it start at multiples of 16 bytes, as grouped GEMMs ask."""
    return -width % (16 // like.element_size())
