"""A contiguous part of a model, which takes and returns the residual stream; for pipelines."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from nvfp4_train.config.model import ModelConfig
from nvfp4_train.config.pattern import LayerKind
from nvfp4_train.model.block import run_blocks
from nvfp4_train.model.hybrid import HybridLM, stream_dtype

StageValues = Tensor | tuple[Tensor, ...]


class ModelPart(HybridLM):
    """Some of the blocks of a model, with the embedding before them or the head behind them if they are at an end.

    It holds the very modules of the model, under their names there (``blocks.<i>`` keeps its ``i``). What it lacks is
    None, or empty. The last part has an embedding too where it needs one: for a tied head, and for multi-token
    prediction, which reads the embeddings of later tokens.

    Args:
        model: Whole.
        blocks: Indices of the blocks that this part has.
        is_first: Whether it has the embedding and starts from tokens.
        is_last: Whether it has the final norm, the head and multi-token prediction, and ends with the loss.
    """

    def __init__(self, model: HybridLM, *, blocks: Iterable[int], is_first: bool, is_last: bool) -> None:
        nn.Module.__init__(self)
        cfg = model.cfg
        self.cfg = cfg
        self.is_first, self.is_last = is_first, is_last
        has_embedding = is_first or (is_last and embeds_at_end(cfg))
        self.embedding = model.embedding if has_embedding else None  # type: ignore[assignment]
        self.blocks = nn.ModuleDict(  # type: ignore[assignment]
            {str(index): model.get_submodule(f"blocks.{index}") for index in blocks}
        )
        self.final_norm = model.final_norm if is_last else None  # type: ignore[assignment]
        self.lm_head = model.lm_head if is_last else None
        self.num_mtp_depths = model.num_mtp_depths if is_last else 0
        self.mtp = model.mtp if is_last else nn.ModuleList()
        self.extra_losses: dict[str, Tensor] = {}
        self.locate_documents = model.locate_documents
        self.cross_entropy, self.tied_logits = model.cross_entropy, model.tied_logits
        self.whole_logits, self.later_embeddings = model.whole_logits, model.later_embeddings
        self.compute_dtype = model.compute_dtype

    def forward(  # type: ignore[override]
        self,
        *stream: Tensor,
        tokens: Tensor,
        document_ids: Tensor,
        position_ids: Tensor | None,
        labels: Tensor,
    ) -> StageValues:
        """Continue where the part before stopped.

        Args:
            stream: What the part before returned; nothing for the first.
            tokens: [B, S] int64, those of the batch, for every part.
            document_ids: [B, S] int.
            position_ids: [B, S] int64, or None.
            labels: [B, S] int64.

        Returns:
            The loss, as ``HybridLM`` does, from the last part. From the others the residual stream [B, S, D], and with
            it, if the routers of the model have penalties, the FP32 sum [] of those so far.
        """
        documents = self.locate_documents(document_ids, position_ids)
        has_embedding = self.is_first or (self.num_mtp_depths > 0 and torch.is_grad_enabled())
        embedded = self._embed(tokens) if has_embedding else stream[0]
        penalties = list(stream[1:])
        h = self._to_stream(embedded) if self.is_first else stream[0]
        h = run_blocks(self.blocks.children(), h, documents, penalties=penalties)
        if self.is_last:
            return self._finish(h, embedded, labels, documents=documents, penalties=penalties)
        if not has_penalties(self.cfg):
            return h
        return h, torch.stack(penalties).sum() if penalties else torch.zeros((), device=h.device)


def boundary_values(
    cfg: ModelConfig, *, shape: tuple[int, int], compute_dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    """Return empty tensors like those that one part hands to the next.

    Args:
        cfg: Of the model.
        shape: Rows and tokens of the residual stream.
        compute_dtype: Of activations.
        device: Where to make them.
    """
    dtype = stream_dtype(cfg, compute_dtype)
    stream = torch.empty(*shape, cfg.d_model, dtype=dtype, device=device, requires_grad=True)
    if not has_penalties(cfg):
        return (stream,)
    return stream, torch.empty((), device=device, requires_grad=True)


def has_penalties(cfg: ModelConfig) -> bool:
    """Return whether routers of the main model add penalties to the loss; they travel along with the stream."""
    return LayerKind.moe in cfg.layer_kinds and _is_penalized(cfg)


def extra_loss_names(cfg: ModelConfig) -> list[str]:
    """Return the names of the ``extra_losses`` of a forward, in their order; the last part reports them."""
    num_depths = cfg.layer_pattern.num_mtp_depths
    kinds = (*cfg.layer_kinds, *(cfg.layer_pattern.mtp if num_depths else ()))
    names = [f"mtp_{depth}" for depth in range(1, num_depths + 1)]
    return [*names, "router"] if LayerKind.moe in kinds and _is_penalized(cfg) else names


def router_names(cfg: ModelConfig) -> list[str]:
    """Return the module names of all routers of the whole model, in its order."""
    num_depths = cfg.layer_pattern.num_mtp_depths
    own_depths = min(num_depths, 1) if cfg.mtp.share_depths else num_depths
    stacks = [
        ("blocks", cfg.layer_kinds),
        *((f"mtp.{depth}.blocks", cfg.layer_pattern.mtp) for depth in range(own_depths)),
    ]
    return [
        f"{stack}.{index}.mixer.router"
        for stack, kinds in stacks
        for index, kind in enumerate(kinds)
        if kind is LayerKind.moe
    ]


def embeds_at_end(cfg: ModelConfig) -> bool:
    """Return whether the end of the model needs the embedding, too."""
    return cfg.tie_embeddings or cfg.layer_pattern.num_mtp_depths > 0


def _is_penalized(cfg: ModelConfig) -> bool:
    return bool(cfg.moe.auxiliary_loss_weight or cfg.moe.z_loss_weight)
