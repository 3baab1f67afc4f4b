"""Memory of each rank, by what it is for."""

from collections import Counter
from dataclasses import dataclass, field

from nvfp4_train.analysis.plan.activations import Activations
from nvfp4_train.analysis.plan.hardware import Label
from nvfp4_train.analysis.plan.layout import Layout
from nvfp4_train.analysis.plan.local import HEAD, BlockKey, ModelKeys
from nvfp4_train.analysis.plan.optimizer_state import OptimizerState
from nvfp4_train.analysis.plan.parameters import (
    EMBEDDING,
    FINAL_NORM,
    MASTER_BYTES,
    MTP,
    Parameter,
    Parameters,
    held_ends,
    num_parameters,
)
from nvfp4_train.analysis.plan.pipeline import peak_bytes
from nvfp4_train.analysis.plan.work import ACTIVATION_BYTES, weight_bytes
from nvfp4_train.config.parallel import ActivationCheckpoint
from nvfp4_train.config.pattern import LayerKind
from nvfp4_train.config.recipe import ComputeDtype
from nvfp4_train.model.loss import CHUNK_ELEMENTS
from nvfp4_train.optim.adamw import BUCKET_ELEMENTS
from nvfp4_train.parallel.stages import StagePlan

GRADIENT_BYTES = 4  # FP32
FRAMEWORK_BYTES = 3 * 2**30  # context, libraries, and what the allocator cannot use
PREFETCHED_BLOCKS = 2  # the one that computes and the one that is gathered meanwhile

# Everything but activations is arithmetic on shapes; what the last four kinds hold at their peak is modelled.
LABELS = {
    "masters": Label.measured,
    "gradients": Label.measured,
    "optimizer": Label.measured,
    "quantized weights": Label.measured,
    "activations": Label.measured,
    "gathered weights": Label.modelled,
    "accumulated gradients": Label.modelled,
    "communication": Label.modelled,
    "workspace": Label.modelled,
}


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one pipeline rank by kind; a rank of any other axis has as many, the last ones of uneven shards fewer.

    Args:
        masters: FP32 parameters.
        gradients: FP32, sharded like them.
        optimizer: Its state.
        quantized_weights: Codes and scales that Linears keep from one microbatch to the next, of whole weights.
        gathered_weights: Whole weights in the compute dtype, as long as they are there at once.
        accumulated_gradients: Whole FP32 gradients between the microbatches of a step; of one block if there is one
            microbatch only.
        activations: Kept between forward and backward, of all microbatches in flight.
        communication: Buffers of collectives.
        workspace: What a backward needs besides: a block's recomputed activations, the gradient of logits; and what
            the framework takes.
        host: Of the host's memory: what is offloaded; not in the total.
    """

    masters: float
    gradients: float
    optimizer: float
    quantized_weights: float
    gathered_weights: float
    accumulated_gradients: float
    activations: float
    communication: float
    workspace: float
    host: float

    @property
    def by_kind(self) -> dict[str, float]:
        """Bytes by the names of ``LABELS``."""
        return {kind: getattr(self, kind.replace(" ", "_")) for kind in LABELS}

    @property
    def total(self) -> float:
        """All of them."""
        return sum(self.by_kind.values())


@dataclass(frozen=True, kw_only=True)
class _Totals:
    """Sums over the parameters of a block, or of a part of the ends, on one rank.

    Args:
        shard: Elements that the rank keeps.
        whole: Elements on the tp and ep rank.
        state: Bytes of optimizer state.
        codes: Bytes of weights that are kept quantized.
        gathered: Bytes of the whole weights in the compute dtype, without those that are read in FP32.
        small: Bytes of those in FP32.
    """

    shard: int
    whole: int
    state: int
    codes: float
    gathered: float
    small: float


@dataclass(kw_only=True)
class MemoryModel:
    """Adds up what a rank holds.

    Args:
        keys: The blocks of the model.
        parameters: Lists parameters.
        activations: Tells what blocks keep.
        state: Of the optimizer.
        compute_dtype: Of activations and gathered weights.
    """

    keys: ModelKeys
    parameters: Parameters
    activations: Activations
    state: OptimizerState
    compute_dtype: ComputeDtype
    _known: dict[tuple[object, ...], _Totals] = field(default_factory=dict)

    def of_rank(self, stages: list[StagePlan], layout: Layout, *, rank: int, shard: int = 0) -> Memory:
        """Return the memory of a pipeline rank, which holds some of the stages.

        Args:
            stages: Of the whole pipeline.
            layout: How ranks share the run.
            rank: Along pp.
            shard: Along dp_shard x cp, of parameters that are no experts; the first rank holds most.
        """
        own = [stage for stage in stages if stage.rank == rank]
        blocks = Counter(self.keys.blocks[index] for stage in own for index in stage.blocks)
        ends = self._ends(own, layout, shard=shard)
        parts = [(self._block_totals(key, layout, shard=shard), count) for key, count in blocks.items()]
        everything = [*parts, *((total, 1) for total in ends.values())]
        elements = sum(count * part.shard for part, count in everything)
        whole = sum(count * part.whole for part, count in everything)
        state = sum(count * part.state for part, count in everything)
        largest = max((part.whole for part, _ in everything), default=0)
        return Memory(
            masters=MASTER_BYTES * elements,
            gradients=GRADIENT_BYTES * elements,
            optimizer=0.0 if self.state.on_host else state,
            quantized_weights=sum(count * part.codes for part, count in everything),
            gathered_weights=_gathered(parts, ends, layout),
            accumulated_gradients=GRADIENT_BYTES * (whole if layout.num_microbatches > 1 else largest),
            activations=self._activations(own, layout, rank=rank),
            communication=self._buffers(largest, layout),
            workspace=self._workspace(own, blocks, layout),
            host=state if self.state.on_host else 0.0,
        )

    def _ends(self, own: list[StagePlan], layout: Layout, *, shard: int) -> dict[str, _Totals]:
        is_first, is_last = any(stage.is_first for stage in own), any(stage.is_last for stage in own)
        held = held_ends(self.parameters.ends(layout), is_first=is_first, is_last=is_last)
        return {name: self._totals((name, shard), part, layout, kind=None) for name, part in held.items()}

    def _block_totals(self, key: BlockKey, layout: Layout, *, shard: int) -> _Totals:
        return self._totals((key, shard), self.parameters.block(key, layout), layout, kind=key.kind)

    def _totals(
        self, what: tuple[object, int], part: list[Parameter], layout: Layout, *, kind: LayerKind | None
    ) -> _Totals:
        key = (*what, layout.tp, layout.ep, layout.fsdp)
        if key not in self._known:
            compute = MASTER_BYTES if self.compute_dtype is ComputeDtype.fp32 else ACTIVATION_BYTES
            shards = [(parameter, parameter.shard(layout, index=what[1])) for parameter in part]
            self._known[key] = _Totals(
                shard=sum(size for _, size in shards),
                whole=num_parameters(part),
                state=sum(self.state.of(parameter, kind=kind, elements=size) for parameter, size in shards),
                codes=sum(p.numel * weight_bytes(p.precision.recipe) for p in part if p.precision is not None),
                gathered=sum(compute * p.numel for p in part if not p.is_fp32),
                small=sum(MASTER_BYTES * p.numel for p in part if p.is_fp32),
            )
        return self._known[key]

    def _activations(self, own: list[StagePlan], layout: Layout, *, rank: int) -> float:
        per_lap = []
        for stage in own:
            per_token = sum(self.activations.block(self.keys.blocks[index], layout) for index in stage.blocks)
            if stage.is_last:
                per_token += self.activations.ends(layout)
            per_lap.append(per_token * layout.tokens)
        return peak_bytes(layout, rank=rank, per_lap=per_lap)

    def _workspace(self, own: list[StagePlan], blocks: Counter[BlockKey], layout: Layout) -> float:
        recomputed = 0.0
        if layout.checkpoint is not ActivationCheckpoint.none:
            recomputed = max(self.activations.whole_block(key, layout) for key in blocks)
        # a backward holds about as much again of gradients of activations as the widest step of a block
        gradients = max(self.activations.whole_block(key, layout) for key in blocks) / 2
        total = (recomputed + gradients) * layout.tokens
        if any(stage.is_last for stage in own):
            logits = self.parameters.model.vocab_size // layout.tp * ACTIVATION_BYTES * layout.tokens
            total += logits + 4 * CHUNK_ELEMENTS
        if self.state.is_converted:
            total += 2 * MASTER_BYTES * BUCKET_ELEMENTS
        return total + FRAMEWORK_BYTES

    def _buffers(self, largest: int, layout: Layout) -> float:
        """A block's weights on their way in and its gradient on its way out; activations between tp and pp ranks."""
        total = 0.0
        if layout.fsdp > 1:
            total += PREFETCHED_BLOCKS * ACTIVATION_BYTES * largest + GRADIENT_BYTES * largest
        stream = self.parameters.model.d_model * ACTIVATION_BYTES * layout.tokens
        if layout.tp > 1:
            total += 2 * stream
        if layout.pp > 1:
            total += 4 * stream / (layout.tp if layout.sequence_parallel else 1)
        if layout.ep > 1:
            moe = self.parameters.model.moe
            total += 2 * layout.tokens * moe.top_k * (moe.d_latent or self.parameters.model.d_model) * ACTIVATION_BYTES
        return total


def _gathered(parts: list[tuple[_Totals, int]], ends: dict[str, _Totals], layout: Layout) -> float:
    """Small FP32 modules, the head and the final norm stay; the embedding goes after its forward."""
    largest = sorted((part.gathered for part, count in parts for _ in range(count)), reverse=True)
    if MTP in ends:
        largest = sorted([*largest, ends[MTP].gathered], reverse=True)
    blocks = sum(largest[:PREFETCHED_BLOCKS]) if layout.reshards else sum(largest)
    if layout.reshard_ranks:
        blocks += sum(largest) / layout.reshard_ranks
    small = sum(count * part.small for part, count in parts)
    head = sum(part.gathered + part.small for name, part in ends.items() if name in (HEAD, FINAL_NORM))
    embedding = ends[EMBEDDING].small if EMBEDDING in ends else 0.0
    return small + max(blocks + head, embedding)
