"""The residual block, and which letter of the pattern is which mixer."""

from torch import Tensor, nn

from nvfp4_train.config.model import ModelConfig
from nvfp4_train.config.pattern import LayerKind
from nvfp4_train.model.attention import Attention
from nvfp4_train.model.documents import Documents
from nvfp4_train.model.mamba2 import Mamba2
from nvfp4_train.model.mlp import build_mlp
from nvfp4_train.model.norm import RMSNorm


class Block(nn.Module):
    """One letter of the pattern: ``h + mixer(norm(h))``."""

    def __init__(self, cfg: ModelConfig, *, kind: LayerKind) -> None:
        super().__init__()
        self.norm = RMSNorm(cfg.d_model, eps=cfg.norm_eps)
        self.mixer = build_mixer(cfg, kind=kind)

    def forward(self, h: Tensor, documents: Documents) -> Tensor:
        """Map the residual stream [B, S, D] to [B, S, D]."""
        return h + self.mixer(self.norm(h), documents)


def build_mixer(cfg: ModelConfig, *, kind: LayerKind) -> nn.Module:
    """Make the mixer of one block; its forward takes ([B, S, D], Documents) and returns [B, S, D]."""
    match kind:
        case LayerKind.mamba:
            return Mamba2(cfg.mamba, d_model=cfg.d_model, norm_eps=cfg.norm_eps)
        case LayerKind.attention:
            return Attention(cfg.attention, d_model=cfg.d_model)
        case LayerKind.mlp:
            return build_mlp(cfg.mlp, d_model=cfg.d_model)
