"""Feed-forward mixers."""

import torch.nn.functional as F
from torch import Tensor, nn

from nvfp4_train.config.model import Activation, MlpConfig
from nvfp4_train.model.documents import Documents
from nvfp4_train.model.linear import Linear


class SquaredReluMlp(nn.Module):
    """``down(relu(up(h))^2)``, without a gate. Source: Primer, https://arxiv.org/abs/2109.08668."""

    def __init__(self, d_model: int, *, d_ff: int) -> None:
        super().__init__()
        self.up_proj = Linear(d_model, d_ff)
        self.down_proj = Linear(d_ff, d_model)

    def forward(self, h: Tensor, documents: Documents) -> Tensor:
        """Map [B, S, D] to [B, S, D]."""
        return self.down_proj(F.relu(self.up_proj(h)).square())


class SwigluMlp(nn.Module):
    """``down(silu(gate(h)) * up(h))``. Source: https://arxiv.org/abs/2002.05202."""

    def __init__(self, d_model: int, *, d_ff: int) -> None:
        super().__init__()
        self.gate_proj = Linear(d_model, d_ff)
        self.up_proj = Linear(d_model, d_ff)
        self.down_proj = Linear(d_ff, d_model)

    def forward(self, h: Tensor, documents: Documents) -> Tensor:
        """Map [B, S, D] to [B, S, D]."""
        return self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


def build_mlp(cfg: MlpConfig, *, d_model: int) -> nn.Module:
    """Make the feed-forward mixer that ``cfg.activation`` names."""
    match cfg.activation:
        case Activation.squared_relu:
            return SquaredReluMlp(d_model, d_ff=cfg.d_ff)
        case Activation.swiglu:
            return SwigluMlp(d_model, d_ff=cfg.d_ff)
