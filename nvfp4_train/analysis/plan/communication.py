"""Bytes that one rank sends along each axis of the mesh in a step, and over which link."""

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from nvfp4_train.analysis.plan.hardware import Hardware
from nvfp4_train.analysis.plan.layout import PARAMETERS_SHARDED, Layout
from nvfp4_train.analysis.plan.local import HEAD, BlockKey
from nvfp4_train.analysis.plan.parameters import (
    EMBEDDING,
    MASTER_BYTES,
    MTP,
    Alike,
    Parameter,
    Parameters,
    elements_alike,
)
from nvfp4_train.analysis.plan.work import ACTIVATION_BYTES
from nvfp4_train.config.model import ModelConfig
from nvfp4_train.config.moe import Activation
from nvfp4_train.config.parallel import ActivationCheckpoint, ReduceDtype
from nvfp4_train.config.pattern import LayerKind
from nvfp4_train.config.recipe import ComputeDtype

GRADIENT_BYTES = 4  # FP32
NVFP4_BYTES = 0.5 + 1 / 16
LOSS_NUMBERS = 3  # per token, in FP32: the largest logit, the sum of exponents, the label's logit


class Link(StrEnum):
    """What a group of ranks talks over."""

    domain = "domain"  # NVLink, Infinity Fabric
    network = "network"


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a pipeline rank has of a model.

    Args:
        blocks: Of the main model.
        mtp: Of all depths of multi-token prediction, if it has them.
        num_depths: Of multi-token prediction, if it has them.
        ends: Parameters outside the blocks of the main model, by part.
        is_first: Whether tokens come in here.
        is_last: Whether the loss comes out here.
        shares_embedding: Whether another rank has the embedding too, as the other end of the model.
        num_sent: Results and gradients of a microbatch that its stages send to other ranks.
    """

    blocks: tuple[BlockKey, ...]
    mtp: tuple[BlockKey, ...] = ()
    num_depths: int = 0
    ends: dict[str, list[Parameter]] = field(default_factory=dict)
    is_first: bool = True
    is_last: bool = True
    shares_embedding: bool = False
    num_sent: int = 0

    @property
    def kinds(self) -> list[LayerKind]:
        """Of all blocks."""
        return [key.kind for key in (*self.blocks, *self.mtp)]


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What one rank sends along an axis in a step.

    Args:
        axis: Of the mesh, or ``ep``; ``near`` is what engine.reshard_ranks takes of dp_shard x cp.
        what: The collectives.
        bytes: Sent in all.
        can_overlap: Whether it may happen while other work is done.
        link: What it goes over.
    """

    axis: str
    what: str
    bytes: float
    can_overlap: bool
    link: Link


def spans(layout: Layout) -> dict[str, int]:
    """Return, per axis, how many neighbouring ranks hold one group: axes further in lie inside it."""
    tp, cp = layout.tp, layout.cp
    return {
        "tp": tp,
        "cp": tp * cp,
        "ep": tp * layout.ep,
        "dp_shard": tp * cp * layout.dp_shard,
        "near": tp * max(layout.reshard_ranks, 1),
        "dp_replicate": tp * cp * layout.dp,
        "pp": layout.devices,
    }


def link_of(axis: str, layout: Layout, hardware: Hardware) -> Link:
    """Return the link of a group: its domain if one holds it, else the network."""
    return Link.domain if spans(layout)[axis] <= hardware.domain else Link.network


def step_traffic(held: Held, *, parameters: Parameters, layout: Layout, hardware: Hardware) -> list[Traffic]:
    """Return what a rank sends in a step; rings, so that each rank sends what it has to each other one."""
    model = parameters.model
    compute = 4.0 if parameters.recipe.compute_dtype is ComputeDtype.fp32 else float(ACTIVATION_BYTES)
    if layout.zero is None:
        data = _data_traffic(held, parameters, layout=layout, compute=compute)
    else:
        data = _zero_traffic(held, parameters, layout=layout, compute=compute)
    found = [
        *data,
        *_tensor_traffic(held, model, layout, compute=compute),
        *_context_traffic(held.kinds, model, layout, compute=compute),
        *_expert_traffic(held.kinds, model, layout, compute=compute),
        *_pipeline_traffic(held, model, layout, compute=compute),
    ]
    return [
        Traffic(axis=axis, what=what, bytes=size, can_overlap=hides, link=link_of(axis, layout, hardware))
        for axis, what, size, hides in found
        if size
    ]


_Row = tuple[str, str, float, bool]


def _data_traffic(held: Held, parameters: Parameters, *, layout: Layout, compute: float) -> list[_Row]:
    """FSDP gathers weights for each forward and backward of a block, or once a step; gradients travel once a step.

    Small FP32 modules of blocks stay gathered for the step, what lies outside blocks from a forward to its backward;
    the embedding, which no backward reads, is gathered for each forward in any case, unless it is the head as well.
    """
    count, is_freed = layout.num_microbatches, layout.reshards
    total = _Data(layout=layout, compute=compute)
    for key, times in Counter(held.blocks).items():
        total.add(parameters.block_elements(key, layout), times, passes=2 * count if is_freed else 1, is_block=True)
    is_tied = HEAD not in parameters.ends(layout)
    for name, part in held.ends.items():
        passes = 2 if name == MTP else 1
        stays = not is_freed and (name != EMBEDDING or is_tied)
        total.add(elements_alike(part, layout), 1, passes=1 if stays else passes * count, is_block=name == MTP)
    return [
        ("dp_shard", "all-gather of weights", total.gathered, True),
        ("near", "all-gather of weights for backward", total.near, True),
        ("dp_shard", "reduce-scatter of gradients", total.reduced, True),
        ("dp_replicate", "all-reduce of gradients", total.replicated, True),
    ]


@dataclass(kw_only=True)
class _Data:
    """Adds up what FSDP sends, in bytes.

    Args:
        layout: How ranks share the run.
        compute: Bytes of a weight that a product sees.
    """

    layout: Layout
    compute: float
    gathered: float = 0.0
    near: float = 0.0
    reduced: float = 0.0
    replicated: float = 0.0

    def add(self, elements: Counter[Alike], times: int, *, passes: int, is_block: bool) -> None:
        """Add parameters of a part of the model, which there is so many times.

        Args:
            elements: By how they travel.
            times: Parts that are alike.
            passes: Gathers of a step.
            is_block: Whether the part is freed between forward and backward.
        """
        layout, count = self.layout, self.layout.num_microbatches
        for kind, number in elements.items():
            shards = layout.expert_fsdp if kind.is_expert else layout.fsdp
            share, size = (shards - 1) / shards, number * times
            is_small = kind.is_fp32 and self.compute < MASTER_BYTES
            width = NVFP4_BYTES if kind.as_codes else MASTER_BYTES if kind.is_fp32 else self.compute
            is_near = is_block and not is_small and layout.reshard_ranks > 0
            gathers = (1 if is_block else min(passes, count)) if is_small else passes
            self.gathered += size * width * share * (gathers - (count if is_near else 0))
            self.near += size * width * (1 - 1 / layout.reshard_ranks) * count if is_near else 0.0
            self.reduced += size * share * GRADIENT_BYTES
            copies = layout.dp_replicate
            self.replicated += size / shards * 2 * (copies - 1) / copies * GRADIENT_BYTES


def _zero_traffic(held: Held, parameters: Parameters, *, layout: Layout, compute: float) -> list[_Row]:
    """DeepSpeed sends everything in FP32, but for the weights that stage 3 gathers for Linears.

    Stages 1 and 2 add up whole gradients on all ranks, stage 1 once a step and stage 2 after each backward, and gather
    the updated parameters. Stage 3 gathers parameters for each forward and backward, those that are not small, and
    scatters gradients after each backward.
    """
    assert layout.zero is not None
    share, count = (layout.dp_shard - 1) / layout.dp_shard, layout.num_microbatches
    held_parameters = [parameter for key in held.blocks for parameter in parameters.block(key, layout)]
    held_parameters += [parameter for part in held.ends.values() for parameter in part]
    whole = MASTER_BYTES * share * sum(parameter.numel for parameter in held_parameters)
    if layout.zero.stage < PARAMETERS_SHARDED:
        times = 1 if layout.zero.stage == 1 else count
        return [
            ("dp_shard", "all-reduce of gradients", 2 * whole * times, True),
            ("dp_shard", "all-gather of updated weights", whole, False),
        ]
    gathered = 0.0
    for parameter in held_parameters:
        if parameter.numel < layout.zero.persistent_below:
            gathered += MASTER_BYTES * parameter.numel
        else:
            gathered += 2 * count * parameter.numel * (MASTER_BYTES if parameter.is_fp32 else compute)
    return [
        ("dp_shard", "all-gather of weights", share * gathered, True),
        ("dp_shard", "reduce-scatter of gradients", whole * count, True),
    ]


def _recomputes(layout: Layout) -> bool:
    """Whether backward repeats the collectives inside a block; the last one of it is needed by nothing in it."""
    return layout.checkpoint is not ActivationCheckpoint.none


def _tensor_traffic(held: Held, model: ModelConfig, layout: Layout, *, compute: float) -> list[_Row]:
    """Every mixer gathers its input and scatters its result, both ways, and so do embedding and head.

    Without sequence parallelism nothing is gathered, and sums go to all ranks. Sums in FP32 of a BF16 model are taken
    inside a mixture of experts, layer by layer.
    """
    if layout.tp == 1:
        return []
    tokens, share = layout.tokens * layout.num_microbatches, (layout.tp - 1) / layout.tp
    added = max(float(layout.tp_sum_bytes), compute)
    once = model.d_model * tokens * share  # elements that a gather or a scatter of the stream sends
    repeated = 1 if _recomputes(layout) else 0
    is_split = layout.sequence_parallel
    gather, scatter = (compute * once, added * once) if is_split else (0.0, 2 * added * once)
    is_exact = layout.tp_sum is ReduceDtype.fp32 and compute < MASTER_BYTES
    experts = held.kinds.count(LayerKind.moe)
    regions = len(held.kinds) - (experts if is_exact else 0)
    per_region = (2 + repeated) * gather + 2 * scatter if is_split else 2 * scatter
    total = regions * per_region
    per_moe = _moe_sums(model, layout, compute=compute, added=added, is_exact=is_exact)
    total += experts * per_moe * tokens * share
    total += experts * (2 + repeated) * gather if is_exact else 0.0
    heads = (1 + held.num_depths) if held.is_last else 0
    total += heads * ((gather + scatter) + 2 * MASTER_BYTES * LOSS_NUMBERS * tokens * share)
    embeds = held.is_first or held.num_depths > 0
    total += (scatter + gather) if embeds else 0.0
    # a depth gathers later embeddings and both halves of its projection's input, and scatters the result
    total += held.num_depths * ((3 * gather + 3 * scatter if is_split else 2 * scatter) + gather + scatter)
    what = "all-gather and reduce-scatter" if is_split else "all-reduce"
    return [("tp", f"{what} of activations", total, False)]


def _moe_sums(model: ModelConfig, layout: Layout, *, compute: float, added: float, is_exact: bool) -> float:
    """Bytes that a mixture of experts sends per token between its layers, before they are shared over the ranks."""
    moe = model.moe
    forwards = 2 if _recomputes(layout) else 1
    width = moe.d_latent or model.d_model
    if not is_exact:  # columns of the experts' width: gathered for the experts, scattered after them
        return (forwards + 1) * width * (compute + added) if moe.d_latent else 0.0
    gates = 2 if moe.activation is Activation.swiglu else 1
    sums = moe.top_k * width * (forwards + gates)  # results, and gradients of what enters the first layers
    sums += model.d_model * (forwards + 1) * (1 if moe.shared_d_ff else 0)
    sums += model.d_model * (forwards + 1) if moe.d_latent else 0
    return 2 * added * sums + (width * compute * (forwards + 1) if moe.d_latent else 0.0)


def _context_traffic(kinds: list[LayerKind], model: ModelConfig, layout: Layout, *, compute: float) -> list[_Row]:
    """Attention gathers keys and values and adds up their gradients in FP32; scans pass states, convolutions tokens."""
    attention, mamba, cp, tp = model.attention, model.mamba, layout.cp, layout.tp
    if cp == 1:
        return []
    forwards = 2 if _recomputes(layout) else 1
    microbatch_rows = layout.micro_batch_size * layout.num_microbatches
    rows, part = microbatch_rows * (cp - 1), layout.sequence_length // cp
    per_token = 2 * attention.num_kv_heads * attention.d_head / tp
    if 0 < attention.window_tokens <= part + 1:  # what it reaches is all in the part before, and travels as it is
        keys = per_token * (attention.window_tokens - 1) * microbatch_rows * (forwards + 1) * compute
    else:
        keys = per_token * part * rows * (forwards * compute + GRADIENT_BYTES)
    states = (mamba.d_inner * mamba.d_state + mamba.num_heads) / tp * MASTER_BYTES * rows * (forwards + 1)
    channels = (mamba.d_inner + 2 * mamba.num_groups * mamba.d_state) / tp
    halo = (mamba.d_conv - 1) * channels * (forwards * compute + GRADIENT_BYTES) * rows
    return [
        ("cp", "keys and values", keys * kinds.count(LayerKind.attention), False),
        ("cp", "states of the scan", states * kinds.count(LayerKind.mamba), False),
        ("cp", "tokens before a convolution", halo * kinds.count(LayerKind.mamba), False),
    ]


def _expert_traffic(kinds: list[LayerKind], model: ModelConfig, layout: Layout, *, compute: float) -> list[_Row]:
    moe, ep = model.moe, layout.ep
    routed = moe.top_k * (moe.d_latent or model.d_model) * compute * layout.tokens * (ep - 1) / ep
    passes = 6 if _recomputes(layout) else 4  # dispatch and combine, forward and backward
    total = routed * passes * kinds.count(LayerKind.moe) * layout.num_microbatches
    return [("ep", "all-to-all of routed tokens", total, False)]


def _pipeline_traffic(held: Held, model: ModelConfig, layout: Layout, *, compute: float) -> list[_Row]:
    if layout.pp == 1:
        return []
    width = max(compute, 4.0 if model.residual_fp32 else 0.0)
    stream = model.d_model * width * layout.tokens / (layout.tp if layout.sequence_parallel else 1)
    shared = sum(parameter.shard(layout) for parameter in held.ends[EMBEDDING]) if held.shares_embedding else 0
    return [
        ("pp", "activations and their gradients", stream * held.num_sent * layout.num_microbatches, True),
        ("pp", "gradient of the shared embedding", float(GRADIENT_BYTES * shared), False),
    ]
