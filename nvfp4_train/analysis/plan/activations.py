"""Bytes that a rank keeps per token of a microbatch, for every kind of block and for what lies outside the blocks."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from nvfp4_train.analysis.plan.layout import Layout, layout_problems
from nvfp4_train.analysis.plan.local import BlockKey, BuiltModel, local_block, local_ends
from nvfp4_train.analysis.plan.saved import FlashAttention, kept_bytes, merge_experts
from nvfp4_train.analysis.plan.stand_ins import as_expert_rank, part_of_rows
from nvfp4_train.config.model import ModelConfig
from nvfp4_train.config.parallel import ActivationCheckpoint
from nvfp4_train.config.pattern import LayerKind
from nvfp4_train.config.problem import ConfigError
from nvfp4_train.config.recipe import RecipeConfig
from nvfp4_train.model.documents import Documents
from nvfp4_train.model.hybrid import HybridLM
from nvfp4_train.model.init import init_parameters
from nvfp4_train.model.moe import Penalized
from nvfp4_train.parallel.activation import checkpoint_activations
from nvfp4_train.precision.apply import TORCH_DTYPE

PROBE_CHUNKS = 2  # a sequence of so many chunks of the scan tells what a longer one keeps per token
PROBE_TOKENS = 256  # at least; a multiple of every recipe's


@dataclass(kw_only=True)
class Activations:
    """Runs blocks once each and remembers what they keep.

    Args:
        model: The whole model.
        recipe: Its recipe.
        device: ``meta`` tells what an accelerator keeps; ``cpu`` runs the CPU's own kernels, for small models.
    """

    model: ModelConfig
    recipe: RecipeConfig
    device: str = "meta"
    _known: dict[tuple[object, ...], float] = field(default_factory=dict)

    def block(self, key: BlockKey, layout: Layout) -> float:
        """Return the bytes that a block of one rank keeps per token of the rank's microbatch.

        Raises:
            ConfigError: where the local widths do not fit the recipe.
        """
        if layout.checkpoint is ActivationCheckpoint.block:
            return self.stream_bytes(layout)
        return self._by_tp(self._as_seen_by(layout, {key.kind}), partial(self._block, key))

    def whole_block(self, key: BlockKey, layout: Layout) -> float:
        """Return the same without checkpointing: what is there while a checkpointed block runs backward."""
        return self.block(key, replace(layout, checkpoint=ActivationCheckpoint.none))

    def ends(self, layout: Layout) -> float:
        """Return what embedding, final norm, head, loss and multi-token prediction keep per token."""
        if not self.model.layer_pattern.num_mtp_depths:  # then there is no block in them that could be checkpointed
            layout = replace(layout, checkpoint=ActivationCheckpoint.none)
        # what its attention keeps of other parts of a row is nothing beside logits
        kinds = set(self.model.layer_pattern.mtp) - {LayerKind.attention}
        return self._by_tp(self._as_seen_by(layout, kinds), self._ends)

    def stream_bytes(self, layout: Layout) -> float:
        """Return the bytes of a token in the residual stream of one rank."""
        return self.model.d_model * self._stream_dtype().itemsize / (layout.tp if layout.sequence_parallel else 1)

    def _as_seen_by(self, layout: Layout, kinds: set[LayerKind]) -> Layout:
        """Leave out of a layout what blocks of these kinds keep nothing for, so that it is one layout to all others.

        Attention keeps keys and values of whole rows. What a scan keeps of other parts is a few tokens and a state a
        row: little beside a part as long as real ones, so that it is left out where a short one is run for it. Experts
        keep two orders of tokens where these come from other ranks; of how many is all the same without values.
        """
        if self.device != "meta":
            return layout if LayerKind.moe in kinds else replace(layout, ep=1)
        if LayerKind.attention not in kinds:
            layout = replace(layout, cp=1, sequence_length=layout.sequence_length // layout.cp)
        return replace(layout, ep=min(layout.ep, 2) if LayerKind.moe in kinds else 1)

    def _by_tp(self, layout: Layout, kept: Callable[[Layout], float]) -> float:
        """Run what is not divided and halves; all widths are divided by tp alike, so that these two tell the rest.

        But where a single group of heads is left, parts of a tensor that were copies are views, and that is run.
        """
        whole, half = (replace(layout, tp=tp) for tp in (1, 2))
        groups = min(self.model.attention.num_kv_heads, self.model.mamba.num_groups)
        is_direct = layout.tp <= 2 or layout.tp >= groups or self.device != "meta"
        if is_direct or layout_problems(half, self.model, devices=half.devices):
            return kept(layout)
        try:
            undivided, halved = kept(whole), kept(half)
        except ConfigError:  # widths that only this degree makes fit
            return kept(layout)
        return (2 * halved - undivided) + 2 * (undivided - halved) / layout.tp

    def _block(self, key: BlockKey, layout: Layout) -> float:
        return self._remember(("block", key), layout, lambda: self._run_block(key, layout))

    def _ends(self, layout: Layout) -> float:
        return self._remember(("ends",), layout, lambda: self._run_ends(layout))

    def _remember(self, what: tuple[object, ...], layout: Layout, run: Callable[[], float]) -> float:
        key = (*what, layout.tp, layout.cp, layout.ep, layout.sequence_parallel, layout.checkpoint, self._shape(layout))
        if key not in self._known:
            self._known[key] = run()
        return self._known[key]

    def _shape(self, layout: Layout) -> tuple[int, int]:
        """Rows and tokens of the sequences that are run: the real ones on a real device."""
        length = layout.sequence_length // layout.cp
        if self.device != "meta":
            return (layout.micro_batch_size, length)
        return (1, min(length, max(PROBE_TOKENS, PROBE_CHUNKS * self.model.mamba.chunk_size)))

    def _run_block(self, key: BlockKey, layout: Layout) -> float:
        model = self._built(local_block(key, self.model, self.recipe, layout=layout), layout)
        block = next(iter(model.all_blocks()))
        kept = self._measure_block(block, layout)
        if layout.checkpoint is ActivationCheckpoint.none:
            return kept - self._saved_by_sequence_parallel(block.norm, layout)
        return kept - (self._stream_dtype().itemsize * self.model.d_model - self.stream_bytes(layout))

    def _measure_block(self, block: nn.Module, layout: Layout) -> float:
        documents = self._documents(layout)

        def run() -> object:
            out = block(self._stream(layout), documents)
            return out.value if isinstance(out, Penalized) else out

        return self._measure(
            run, layout, shared=[*block.parameters(), documents.ids, documents.positions, documents.whole_ids]
        )

    def _saved_by_sequence_parallel(self, norm: nn.Module, layout: Layout) -> float:
        """What a norm keeps less where the residual stream is divided over tp."""
        if layout.tp == 1 or not layout.sequence_parallel:
            return 0.0
        kept = self._measure(lambda: norm(self._stream(layout)), layout, shared=list(norm.parameters()))
        return kept * (1 - 1 / layout.tp)

    def _run_ends(self, layout: Layout) -> float:
        """A model of one MLP block and all depths of multi-token prediction, without that block."""
        model = self._built(local_ends(self.model, self.recipe, layout=layout), layout)
        shape = self._shape(layout)

        def run() -> object:
            tokens, labels = (torch.zeros(shape, dtype=torch.int64, device=self.device) for _ in range(2))
            return model(tokens, document_ids=self._whole_ids(layout), labels=labels)

        whole = self._measure(run, layout, shared=list(model.parameters()))
        kept = whole - self._measure_block(model.blocks[0], layout)
        return kept - self._saved_by_sequence_parallel(model.final_norm, layout)

    def _built(self, built: BuiltModel, layout: Layout) -> HybridLM:
        model = built.model
        model.locate_documents = partial(part_of_rows, cp=layout.cp)
        if layout.ep > 1:
            as_expert_rank(model, ep=layout.ep)
        if self.device == "meta":
            merge_experts(model)
        else:
            model.to_empty(device=self.device)
            init_parameters(model, model.cfg, seed=0)
        checkpoint_activations(model, layout.checkpoint)
        return model

    def _measure(self, run: Callable[[], object], layout: Layout, *, shared: list[Tensor]) -> float:
        mode: AbstractContextManager[object] = FlashAttention() if self.device == "meta" else nullcontext()
        with mode:
            kept = kept_bytes(run, checkpoint=layout.checkpoint, shared=shared)
        batch, length = self._shape(layout)
        return kept / (batch * length)

    def _documents(self, layout: Layout) -> Documents:
        return part_of_rows(self._whole_ids(layout), cp=layout.cp)

    def _whole_ids(self, layout: Layout) -> Tensor:
        batch, length = self._shape(layout)
        return torch.zeros(batch, length * layout.cp, dtype=torch.int32, device=self.device)

    def _stream(self, layout: Layout) -> Tensor:
        shape = (*self._shape(layout), self.model.d_model)
        return torch.zeros(shape, dtype=self._stream_dtype(), device=self.device, requires_grad=True)

    def _stream_dtype(self) -> torch.dtype:
        return torch.float32 if self.model.residual_fp32 else TORCH_DTYPE[self.recipe.compute_dtype]
