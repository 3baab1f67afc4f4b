"""The residual block, and which letter of the pattern is which mixer."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from nvfp4_train.config.model import ModelConfig
from nvfp4_train.config.pattern import LayerKind
from nvfp4_train.model.attention import Attention
from nvfp4_train.model.documents import Documents
from nvfp4_train.model.mamba2 import Mamba2
from nvfp4_train.model.mlp import build_mlp
from nvfp4_train.model.moe import Moe, Penalized
from nvfp4_train.model.norm import RMSNorm


class Block(nn.Module):
    """One letter of the pattern: ``h + mixer(norm(h))``.

    Attributes:
        compute_dtype: Dtype in which the mixer works; None: that of the residual stream.
    """

    def __init__(self, cfg: ModelConfig, *, kind: LayerKind) -> None:
        super().__init__()
        self.kind = kind
        self.compute_dtype: torch.dtype | None = None
        self.norm = RMSNorm(cfg.d_model, eps=cfg.norm_eps)
        self.mixer = build_mixer(cfg, kind=kind)

    def forward(self, h: Tensor, documents: Documents) -> Tensor | Penalized:
        """Map the residual stream [B, S, D] to [B, S, D], with the penalty of a mixer that has one."""
        normed = self.norm(h)
        mixed = self.mixer(normed if self.compute_dtype is None else normed.to(self.compute_dtype), documents)
        if isinstance(mixed, Penalized):
            return Penalized(h + mixed.value, mixed.penalty)
        return h + mixed


def build_mixer(cfg: ModelConfig, *, kind: LayerKind) -> nn.Module:
    """Make the mixer of one block.

    Its forward takes ([B, S, D], Documents) and returns [B, S, D], or that and a penalty.
    """
    match kind:
        case LayerKind.mamba:
            return Mamba2(cfg.mamba, d_model=cfg.d_model, norm_eps=cfg.norm_eps)
        case LayerKind.attention:
            return Attention(cfg.attention, d_model=cfg.d_model, norm_eps=cfg.norm_eps)
        case LayerKind.mlp:
            return build_mlp(cfg.mlp, d_model=cfg.d_model)
        case LayerKind.moe:
            return Moe(cfg.moe, d_model=cfg.d_model)


def run_blocks(blocks: Iterable[nn.Module], h: Tensor, documents: Documents, *, penalties: list[Tensor]) -> Tensor:
    """Send the residual stream [B, S, D] through blocks in order; their penalties are appended to ``penalties``."""
    for block in blocks:
        out = block(h, documents)
        if isinstance(out, Penalized):
            penalties.append(out.penalty)
            out = out.value
        h = out
    return h
