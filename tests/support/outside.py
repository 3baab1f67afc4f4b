"""Extensions as a user would write them, for tests of the interface."""

import torch
from torch import Tensor, nn


def doubled(x, spec, stream, *, amax, times=2.0) -> Tensor:
    """A quantizer that returns values."""
    return (x * times).to(torch.bfloat16)


def fprop_row(x, w, tools, *, times=1.0) -> Tensor:
    """A row that does what the table would, times a factor."""
    a, b = tools.round("fprop.x", x), tools.round("fprop.w", w)
    return tools.multiply(a, b, out_dtype=x.dtype) * times


def dgrad_row(dy, w, tools) -> Tensor:
    a, b = tools.round("dgrad.dy", dy), tools.round("dgrad.w", w)
    return tools.multiply(a, b, out_dtype=dy.dtype)


def wgrad_row(x, dy, tools) -> Tensor:
    a, b = tools.round("wgrad.dy", dy), tools.round("wgrad.x", x)
    return tools.multiply(a, b, out_dtype=torch.float32)


class Pair:
    """A Linear that rounds nothing and keeps its input."""

    @staticmethod
    def forward(x, w, tools):
        return tools.multiply(x, w, out_dtype=x.dtype), (x, w)

    @staticmethod
    def backward(dy, saved, tools):
        x, w = saved
        dx = tools.multiply(dy, w.t(), out_dtype=dy.dtype) if tools.needs_dx else None
        dw = tools.multiply(dy.t(), x.t(), out_dtype=torch.float32) if tools.needs_dw else None
        return dx, dw


def halve(model: nn.Module, *, step: int, after: int = 0) -> None:
    """After-optimizer hook."""
    if step > after:
        for parameter in model.parameters():
            parameter.mul_(0.5)


NOT_A_FUNCTION = 3
