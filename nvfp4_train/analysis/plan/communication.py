"""Bytes that one rank sends along each axis of the mesh in a step, and over which link."""

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from nvfp4_train.analysis.plan.hardware import Hardware
from nvfp4_train.analysis.plan.layout import Layout
from nvfp4_train.analysis.plan.local import BlockKey
from nvfp4_train.analysis.plan.parameters import Parameter, Parameters
from nvfp4_train.analysis.plan.work import ACTIVATION_BYTES
from nvfp4_train.config.model import ModelConfig
from nvfp4_train.config.parallel import ActivationCheckpoint
from nvfp4_train.config.pattern import LayerKind

GRADIENT_BYTES = 4  # FP32
NVFP4_BYTES = 0.5 + 1 / 16


class Link(StrEnum):
    """What a group of ranks talks over."""

    domain = "domain"  # NVLink, Infinity Fabric
    network = "network"


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


def step_traffic(
    blocks: list[BlockKey],
    ends: list[Parameter],
    *,
    parameters: Parameters,
    layout: Layout,
    hardware: Hardware,
) -> list[Traffic]:
    """Return what a rank that holds these blocks and these parameters of the ends sends in a step."""
    model, kinds = parameters.model, [key.kind for key in blocks]
    listed = [
        (parameter, count, True)
        for key, count in Counter(blocks).items()
        for parameter in parameters.block(key, layout)
    ]
    listed += [(parameter, 1, False) for parameter in ends]
    found = [
        *_data_traffic(listed, layout),
        *_tensor_traffic(len(blocks), model, layout),
        *_context_traffic(kinds, model, layout),
        *_expert_traffic(kinds, model, layout),
        *_pipeline_traffic(model, layout),
    ]
    return [
        Traffic(axis=axis, what=what, bytes=size, can_overlap=hides, link=link_of(axis, layout, hardware))
        for axis, what, size, hides in found
        if size
    ]


_Row = tuple[str, str, float, bool]


def _data_traffic(listed: list[tuple[Parameter, int, bool]], layout: Layout) -> list[_Row]:
    """FSDP gathers weights for each forward and backward of a block, or once a step; gradients travel once a step."""
    gathers = 2 * layout.num_microbatches if layout.reshards else 1
    gathered = reduced = replicated = near = 0.0
    for parameter, times, is_block in listed:
        shards = layout.expert_fsdp if parameter.is_expert else layout.fsdp
        is_near = is_block and layout.reshard_ranks > 0
        share = (shards - 1) / shards
        bytes_per_element = 4.0 if parameter.is_fp32 else 2.0
        if layout.gathers_codes and parameter.precision is not None and parameter.shape[0] % (16 * shards) == 0:
            bytes_per_element = NVFP4_BYTES
        elements = parameter.numel * times
        size = elements * bytes_per_element
        gathered += size * share * ((gathers if is_block else 1) - (layout.num_microbatches if is_near else 0))
        near += size * (1 - 1 / layout.reshard_ranks) * layout.num_microbatches if is_near else 0.0
        reduced += elements * share * GRADIENT_BYTES
        copies = layout.dp_replicate
        replicated += elements / shards * 2 * (copies - 1) / copies * GRADIENT_BYTES
    return [
        ("dp_shard", "all-gather of weights", gathered, True),
        ("near", "all-gather of weights for backward", near, True),
        ("dp_shard", "reduce-scatter of gradients", reduced, True),
        ("dp_replicate", "all-reduce of gradients", replicated, True),
    ]


def _tensor_traffic(num_blocks: int, model: ModelConfig, layout: Layout) -> list[_Row]:
    """Every mixer gathers its input and scatters its result, both ways; checkpointing repeats the forward."""
    tokens = layout.tokens * layout.num_microbatches
    once = model.d_model * ACTIVATION_BYTES * tokens * (layout.tp - 1) / layout.tp
    passes = 6 if layout.checkpoint is ActivationCheckpoint.block else 4
    what = "all-gather and reduce-scatter" if layout.sequence_parallel else "all-reduce"
    return [("tp", f"{what} of activations", once * passes * num_blocks, False)]


def _context_traffic(kinds: list[LayerKind], model: ModelConfig, layout: Layout) -> list[_Row]:
    attention, mamba = model.attention, model.mamba
    cp, tp = layout.cp, layout.tp
    forwards = 2 if layout.checkpoint is ActivationCheckpoint.block else 1
    per_token = 2 * attention.num_kv_heads * attention.d_head / tp * ACTIVATION_BYTES
    part = layout.sequence_length // cp
    # A window that ends in the part before needs no more than it holds.
    others = attention.window_tokens - 1 if 0 < attention.window_tokens <= part + 1 and cp > 1 else part * (cp - 1)
    keys = per_token * layout.micro_batch_size * others * (forwards + 1)
    states = mamba.d_inner / tp * mamba.d_state * 4 * layout.micro_batch_size * (cp - 1) / cp * (forwards + 1)
    count = layout.num_microbatches
    return [
        ("cp", "keys and values", keys * kinds.count(LayerKind.attention) * count, False),
        ("cp", "states of the scan", states * kinds.count(LayerKind.mamba) * count if cp > 1 else 0.0, False),
    ]


def _expert_traffic(kinds: list[LayerKind], model: ModelConfig, layout: Layout) -> list[_Row]:
    moe, ep = model.moe, layout.ep
    routed = moe.top_k * (moe.d_latent or model.d_model) * ACTIVATION_BYTES * layout.tokens * (ep - 1) / ep
    passes = 6 if layout.checkpoint is ActivationCheckpoint.block else 4  # dispatch and combine, forward and backward
    total = routed * passes * kinds.count(LayerKind.moe) * layout.num_microbatches
    return [("ep", "all-to-all of routed tokens", total, False)]


def _pipeline_traffic(model: ModelConfig, layout: Layout) -> list[_Row]:
    if layout.pp == 1:
        return []
    stream = model.d_model * ACTIVATION_BYTES * layout.tokens / (layout.tp if layout.sequence_parallel else 1)
    total = 2 * stream * layout.num_microbatches * layout.num_virtual_stages
    return [("pp", "activations and their gradients", total, True)]
