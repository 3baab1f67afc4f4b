"""Feed-forward mixers."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nvfp4_train.config.model import MlpConfig
from nvfp4_train.config.moe import Activation
from nvfp4_train.model.documents import Documents
from nvfp4_train.model.kernels import pointwise as _kernels  # noqa: F401 - makes the ops
from nvfp4_train.model.kernels.program import is_fused
from nvfp4_train.model.linear import Linear


class Mlp(nn.Module):
    """``down(activate(up(h)))``; with SwiGLU, ``gate_proj`` gates the result of ``up_proj``."""

    def __init__(self, d_model: int, *, d_ff: int, activation: Activation, bias: bool) -> None:
        super().__init__()
        self.activation = activation
        self.gate_proj = Linear(d_model, d_ff, bias=bias) if activation is Activation.swiglu else None
        self.up_proj = Linear(d_model, d_ff, bias=bias)
        self.down_proj = Linear(d_ff, d_model, bias=bias)

    def forward(self, h: Tensor, documents: Documents) -> Tensor:
        """Map [..., D] to [..., D]; tokens do not see each other."""
        gate = None if self.gate_proj is None else self.gate_proj(h)
        return self.down_proj(activate(self.up_proj(h), gate, activation=self.activation))


def activate(up: Tensor, gate: Tensor | None, *, activation: Activation) -> Tensor:
    """Apply the non-linearity between two projections; only SwiGLU has a gate.

    Source: squared ReLU, Primer, https://arxiv.org/abs/2109.08668; SwiGLU, https://arxiv.org/abs/2002.05202; GELU,
    https://arxiv.org/abs/1606.08415, with the exact error function.
    """
    match activation:
        case Activation.squared_relu:
            return squared_relu(up)
        case Activation.gelu:
            return F.gelu(up)
        case Activation.swiglu:
            assert gate is not None
            return F.silu(gate) * up


def squared_relu(x: Tensor) -> Tensor:
    """Return ``max(x, 0) ** 2``; on a CPU forward and backward are one pass each."""
    return _SquaredRelu.apply(x) if is_fused(x) else F.relu(x).square()


class _SquaredRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.ops.nvfp4_train.squared_relu(x)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> Tensor:
        return torch.ops.nvfp4_train.squared_relu_backward(grad_y, *ctx.saved_tensors)


def build_mlp(cfg: MlpConfig, *, d_model: int) -> Mlp:
    """Make the feed-forward mixer."""
    return Mlp(d_model, d_ff=cfg.d_ff, activation=cfg.activation, bias=cfg.bias)
