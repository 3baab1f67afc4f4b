"""The hybrid language model."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nvfp4_train.config.model import ModelConfig
from nvfp4_train.model.block import Block, run_blocks
from nvfp4_train.model.documents import Documents, locate_documents
from nvfp4_train.model.linear import Linear
from nvfp4_train.model.loss import IGNORE_INDEX, cross_entropy_sum_
from nvfp4_train.model.mtp import MtpDepth, later_embeddings, later_labels
from nvfp4_train.model.norm import RMSNorm


class HybridLM(nn.Module):
    """Embedding, one residual block per letter of the pattern, a final norm and the output head.

    Module names are checkpoint names: ``embedding``, ``blocks.<i>.norm``, ``blocks.<i>.mixer``, ``final_norm``,
    ``lm_head``, and ``mtp.<depth>`` for multi-token prediction (one depth, used again, where depths share weights).
    With tied embeddings there is no ``lm_head``: the embedding's weight is the one parameter.

    Parameters are uninitialized FP32 masters until ``init_parameters`` or a checkpoint fills them. ``compute_dtype`` is
    the dtype of activations; every module casts its own weight.

    Attributes:
        extra_losses: Of the newest forward that recorded gradients, detached: the sum over labels, and their number,
            of ``mtp_<depth>`` (cross-entropy) and ``router`` (weighted sum of the routers' penalties); [2] each. Where
            the tokens are parts of rows, those of all parts together are the sums over whole rows.
        locate_documents: Prepares the document layout of a batch; replaced where the tokens are parts of rows.
        cross_entropy: From logits [T, V] and labels [T] to the sum of the loss. This and what follows are replaced
            where ranks hold parts of the vocabulary.
        tied_logits: From activations and the embedding's weight to logits.
        whole_logits: From the logits that are computed here to those of the whole vocabulary.
        later_embeddings: See the function of that name.
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
        self.locate_documents: Callable[[Tensor, Tensor | None], Documents] = locate_documents
        self.cross_entropy: Callable[[Tensor, Tensor], Tensor] = cross_entropy_sum_
        self.tied_logits: Callable[[Tensor, Tensor], Tensor] = _project
        self.whole_logits: Callable[[Tensor], Tensor] = _as_they_are
        self.later_embeddings: Callable[..., Tensor] = later_embeddings
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
            tokens: [B, S] int64; of a part of every row where ``locate_documents`` says so, as ``labels``.
            document_ids: [B, S] int of whole rows; equal for tokens of one document, which are neighbours. Nothing
                flows between documents.
            position_ids: [B, S] int64 of whole rows, restarting in each document; derived from ``document_ids`` if
                None.
            labels: [B, S] int64, the token wanted at each place, or ``IGNORE_INDEX``.

        Returns:
            Logits [B, S, V] in ``compute_dtype`` without labels; with them, the FP32 sum of the cross-entropy over the
            counted labels. Multi-token prediction and the routers' penalties add to its gradient, not to its value.
        """
        documents = self.locate_documents(document_ids, position_ids)
        embedded = self._embed(tokens)
        penalties: list[Tensor] = []
        stream = run_blocks(self.blocks.children(), self._to_stream(embedded), documents, penalties=penalties)
        return self._finish(stream, embedded, labels, documents=documents, penalties=penalties)

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens).to(self.compute_dtype)

    def _to_stream(self, embedded: Tensor) -> Tensor:
        # Multi-token prediction reads the embeddings too. Gradients of the stream are added up in a node of their own
        # and then to those, so that in BF16 too the order is the same with and without an engine's hooks on blocks.
        return embedded.to(stream_dtype(self.cfg, embedded.dtype)).view_as(embedded)

    def _finish(
        self, stream: Tensor, embedded: Tensor, labels: Tensor | None, *, documents: Documents, penalties: list[Tensor]
    ) -> Tensor:
        """Return logits or the loss, see `forward`; ``embedded`` is read by multi-token prediction only."""
        h = self.final_norm(stream).to(self.compute_dtype)
        if labels is None:
            return self.whole_logits(self._head(h))
        loss = self._loss(h, labels)
        if not torch.is_grad_enabled():
            return loss
        extra = self._mtp_losses(h, embedded, labels, documents=documents, penalties=penalties)
        if penalties:
            num_labels = documents.mean_over_parts(count_labels(labels))
            extra["router"] = (torch.stack(penalties).sum() * num_labels, num_labels)
        self.extra_losses = {name: torch.stack((value.detach(), count)) for name, (value, count) in extra.items()}
        if not extra:
            return loss
        weights = {"router": 1.0}
        mtp_weight = self.cfg.mtp.loss_weight / max(self.num_mtp_depths, 1)
        added = torch.stack([weights.get(name, mtp_weight) * value for name, (value, _) in extra.items()]).sum()
        return loss + (added - added.detach())

    def _mtp_losses(
        self, h: Tensor, embedded: Tensor, labels: Tensor, *, documents: Documents, penalties: list[Tensor]
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the sum of the cross-entropy of each depth, and its labels, which end earlier than those before."""
        losses = {}
        for depth in range(1, self.num_mtp_depths + 1):
            module = self.mtp[0 if self.cfg.mtp.share_depths else depth - 1]
            h, of_routers = module(h, self.later_embeddings(embedded, documents, by=depth), documents)
            penalties += of_routers
            later = later_labels(labels, documents, depth=depth)
            losses[f"mtp_{depth}"] = (self._loss(h, later), count_labels(later))
        return losses

    def _loss(self, h: Tensor, labels: Tensor) -> Tensor:
        return self.cross_entropy(self._head(h).flatten(0, 1), labels.flatten())

    def _head(self, h: Tensor) -> Tensor:
        if self.lm_head is None:
            return self.tied_logits(h, self.embedding.weight)
        return self.lm_head(h)


def _project(h: Tensor, weight: Tensor) -> Tensor:
    return F.linear(h, weight.to(h.dtype))


def _as_they_are(logits: Tensor) -> Tensor:
    return logits


def count_labels(labels: Tensor) -> Tensor:
    """Return the number of labels that count, an FP32 scalar on their device."""
    return (labels != IGNORE_INDEX).sum().to(torch.float32)


def stream_dtype(cfg: ModelConfig, compute_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the residual stream."""
    return torch.promote_types(compute_dtype, torch.float32) if cfg.residual_fp32 else compute_dtype


def build_model(cfg: ModelConfig) -> HybridLM:
    """Make the model that ``cfg`` describes, uninitialized, on the default device (``meta`` to allocate nothing)."""
    return HybridLM(cfg)
