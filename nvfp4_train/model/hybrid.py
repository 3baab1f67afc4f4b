"""The hybrid language model."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nvfp4_train.config.model import ModelConfig
from nvfp4_train.model.block import Block
from nvfp4_train.model.documents import locate_documents
from nvfp4_train.model.linear import Linear
from nvfp4_train.model.loss import cross_entropy_sum
from nvfp4_train.model.norm import RMSNorm


class HybridLM(nn.Module):
    """Embedding, one residual block per letter of the pattern, a final norm and the output head.

    Module names are checkpoint names: ``embedding``, ``blocks.<i>.norm``, ``blocks.<i>.mixer``, ``final_norm``,
    ``lm_head``. With tied embeddings there is no ``lm_head``: the embedding's weight is the one parameter.

    Parameters are uninitialized FP32 masters until ``init_parameters`` or a checkpoint fills them. ``compute_dtype`` is
    the dtype of activations; every module casts its own weight.
    """

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.compute_dtype = torch.float32
        self.embedding = nn.Embedding(cfg.vocab_size, cfg.d_model)
        self.blocks = nn.ModuleList(Block(cfg, kind=kind) for kind in cfg.layer_kinds)
        self.final_norm = RMSNorm(cfg.d_model, eps=cfg.norm_eps)
        self.lm_head = None if cfg.tie_embeddings else Linear(cfg.d_model, cfg.vocab_size)

    def forward(
        self, tokens: Tensor, *, document_ids: Tensor, position_ids: Tensor | None = None, labels: Tensor | None = None
    ) -> Tensor:
        """Predict the next token at every place.

        Args:
            tokens: [B, S] int64.
            document_ids: [B, S] int; equal for tokens of one document, which are neighbours. Nothing flows between
                documents.
            position_ids: [B, S] int64, restarting in each document; derived from ``document_ids`` if None.
            labels: [B, S] int64, the token wanted at each place, or ``IGNORE_INDEX``.

        Returns:
            Logits [B, S, V] in ``compute_dtype`` without labels; with them, the FP32 sum of the cross-entropy over the
            counted labels.
        """
        documents = locate_documents(document_ids, position_ids)
        h = self.embedding(tokens).to(self.compute_dtype)
        for block in self.blocks:
            h = block(h, documents)
        logits = self._head(self.final_norm(h))
        if labels is None:
            return logits
        return cross_entropy_sum(logits.flatten(0, 1), labels.flatten())

    def _head(self, h: Tensor) -> Tensor:
        if self.lm_head is None:
            return F.linear(h, self.embedding.weight.to(h.dtype))
        return self.lm_head(h)


def build_model(cfg: ModelConfig) -> HybridLM:
    """Make the model that ``cfg`` describes, uninitialized, on the default device (``meta`` to allocate nothing)."""
    return HybridLM(cfg)
