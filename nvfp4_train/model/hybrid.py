"""The hybrid language model."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nvfp4_train.config.model import ModelConfig
from nvfp4_train.model.block import Block, run_blocks
from nvfp4_train.model.documents import Documents, locate_documents
from nvfp4_train.model.linear import Linear
from nvfp4_train.model.loss import IGNORE_INDEX, cross_entropy_sum
from nvfp4_train.model.mtp import MtpDepth, later_labels, shift_left
from nvfp4_train.model.norm import RMSNorm


class HybridLM(nn.Module):
    """Embedding, one residual block per letter of the pattern, a final norm and the output head.

    Module names are checkpoint names: ``embedding``, ``blocks.<i>.norm``, ``blocks.<i>.mixer``, ``final_norm``,
    ``lm_head``, and ``mtp.<depth>`` for multi-token prediction (one depth, used again, where depths share weights).
    With tied embeddings there is no ``lm_head``: the embedding's weight is the one parameter.

    Parameters are uninitialized FP32 masters until ``init_parameters`` or a checkpoint fills them. ``compute_dtype`` is
    the dtype of activations; every module casts its own weight.

    Attributes:
        extra_losses: Per counted label, detached, of the newest forward that recorded gradients: ``mtp_<depth>``
            (cross-entropy) and ``router`` (weighted sum of the routers' penalties).
    """

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        pattern = cfg.layer_pattern
        self.cfg = cfg
        self.embedding = nn.Embedding(cfg.vocab_size, cfg.d_model)
        self.blocks = nn.ModuleList(Block(cfg, kind=kind) for kind in pattern.layers)
        self.final_norm = RMSNorm(cfg.d_model, eps=cfg.norm_eps)
        self.lm_head = None if cfg.tie_embeddings else Linear(cfg.d_model, cfg.vocab_size)
        self.num_mtp_depths = pattern.num_mtp_depths
        own_depths = min(pattern.num_mtp_depths, 1) if cfg.mtp.share_depths else pattern.num_mtp_depths
        self.mtp = nn.ModuleList(MtpDepth(cfg) for _ in range(own_depths))
        self.extra_losses: dict[str, Tensor] = {}
        self.compute_dtype = torch.float32

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of activations."""
        return self._compute_dtype

    @compute_dtype.setter
    def compute_dtype(self, dtype: torch.dtype) -> None:
        self._compute_dtype = dtype
        for block in self.all_blocks():
            block.compute_dtype = dtype

    def all_blocks(self) -> Iterator[Block]:
        """Yield every residual block, those of multi-token prediction last."""
        stacks = [self.blocks, *(depth.blocks for depth in self.mtp.children())]
        for stack in stacks:
            yield from stack.children()  # type: ignore[misc, union-attr]

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
            counted labels. Multi-token prediction and the routers' penalties add to its gradient, not to its value.
        """
        documents = locate_documents(document_ids, position_ids)
        embedded = self._embed(tokens)
        penalties: list[Tensor] = []
        stream = run_blocks(self.blocks.children(), self._to_stream(embedded), documents, penalties=penalties)
        return self._finish(stream, embedded, labels, documents=documents, penalties=penalties)

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens).to(self.compute_dtype)

    def _to_stream(self, embedded: Tensor) -> Tensor:
        return embedded.to(stream_dtype(self.cfg, embedded.dtype))

    def _finish(
        self, stream: Tensor, embedded: Tensor, labels: Tensor | None, *, documents: Documents, penalties: list[Tensor]
    ) -> Tensor:
        """Return logits or the loss, see `forward`; ``embedded`` is read by multi-token prediction only."""
        h = self.final_norm(stream).to(self.compute_dtype)
        if labels is None:
            return self._head(h)
        loss = self._loss(h, labels)
        if not torch.is_grad_enabled():
            return loss
        num_labels = (labels != IGNORE_INDEX).sum()
        extra = self._mtp_losses(h, embedded, labels, documents=documents, penalties=penalties)
        if penalties:
            extra["router"] = torch.stack(penalties).sum() * num_labels
        self.extra_losses = {name: (value / num_labels).detach() for name, value in extra.items()}
        if not extra:
            return loss
        weights = {"router": 1.0}
        mtp_weight = self.cfg.mtp.loss_weight / max(self.num_mtp_depths, 1)
        added = torch.stack([weights.get(name, mtp_weight) * value for name, value in extra.items()]).sum()
        return loss + (added - added.detach())

    def _mtp_losses(
        self, h: Tensor, embedded: Tensor, labels: Tensor, *, documents: Documents, penalties: list[Tensor]
    ) -> dict[str, Tensor]:
        """Return the sum of the cross-entropy of each depth; a depth's labels end earlier than those of the last."""
        losses = {}
        for depth in range(1, self.num_mtp_depths + 1):
            module = self.mtp[0 if self.cfg.mtp.share_depths else depth - 1]
            h, of_routers = module(h, shift_left(embedded, documents, by=depth, fill=0.0), documents)
            penalties += of_routers
            losses[f"mtp_{depth}"] = self._loss(h, later_labels(labels, documents, depth=depth))
        return losses

    def _loss(self, h: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy_sum(self._head(h).flatten(0, 1), labels.flatten())

    def _head(self, h: Tensor) -> Tensor:
        if self.lm_head is None:
            return F.linear(h, self.embedding.weight.to(h.dtype))
        return self.lm_head(h)


def stream_dtype(cfg: ModelConfig, compute_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the residual stream."""
    return torch.promote_types(compute_dtype, torch.float32) if cfg.residual_fp32 else compute_dtype


def build_model(cfg: ModelConfig) -> HybridLM:
    """Make the model that ``cfg`` describes, uninitialized, on the default device (``meta`` to allocate nothing)."""
    return HybridLM(cfg)
