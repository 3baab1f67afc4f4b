"""Multi-token prediction: depth k predicts, at every place, the token k places after the next one."""

import torch
from torch import Tensor, nn

from nvfp4_train.config.model import ModelConfig
from nvfp4_train.model.block import Block, run_blocks
from nvfp4_train.model.documents import Documents
from nvfp4_train.model.linear import Linear
from nvfp4_train.model.loss import IGNORE_INDEX
from nvfp4_train.model.norm import RMSNorm


class MtpDepth(nn.Module):
    """One depth: the normed stream of the depth before, joined with the embedding of a later token, through blocks.

    Its output goes to the output head, which all depths share with the main model, and to the next depth.

    Source: DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 2.2; names and order of the projection's input are
    those of Megatron-LM.
    """

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.enorm = RMSNorm(cfg.d_model, eps=cfg.norm_eps)
        self.hnorm = RMSNorm(cfg.d_model, eps=cfg.norm_eps)
        self.eh_proj = Linear(2 * cfg.d_model, cfg.d_model)
        self.blocks = nn.ModuleList(Block(cfg, kind=kind) for kind in cfg.layer_pattern.mtp)
        self.final_norm = RMSNorm(cfg.d_model, eps=cfg.norm_eps)
        self.residual_fp32 = cfg.residual_fp32

    def forward(self, h: Tensor, embedded: Tensor, documents: Documents) -> tuple[Tensor, list[Tensor]]:
        """Map the depth before and the embeddings, both [B, S, D] in the compute dtype, to this depth and penalties."""
        penalties: list[Tensor] = []
        stream = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(h)), dim=-1))
        if self.residual_fp32:
            stream = stream.to(torch.promote_types(h.dtype, torch.float32))
        stream = run_blocks(self.blocks.children(), stream, documents, penalties=penalties)
        return self.final_norm(stream).to(h.dtype), penalties


def shift_left(values: Tensor, documents: Documents, *, by: int, fill: float) -> Tensor:
    """Return, at each place, what stands ``by`` places later in the same document, or ``fill`` beyond its end.

    Args:
        values: [B, S] or [B, S, D].
        documents: Of the batch.
        by: At least 1.
        fill: For places without a later one.
    """
    shifted = torch.full_like(values, fill)
    later, ids = documents.with_following(values, count=by)
    reached = later.shape[1] - by  # places that have a later one
    if reached > 0:
        same = ids[:, by:] == ids[:, :reached]
        shifted[:, :reached] = torch.where(same if values.ndim == 2 else same[..., None], later[:, by:], fill)
    return shifted


def later_embeddings(embedded: Tensor, documents: Documents, *, by: int) -> Tensor:
    """Return the embedding of the token ``by`` places later in the same document, or zeros; [B, S, D]."""
    return shift_left(embedded, documents, by=by, fill=0.0)


def later_labels(labels: Tensor, documents: Documents, *, depth: int) -> Tensor:
    """Return the labels of ``depth`` (1 for the first), from those of the next token, both [B, S]."""
    return shift_left(labels, documents, by=depth, fill=IGNORE_INDEX)
