"""What DeepSpeed keeps of a model: ZeRO stages 1 to 3 in FP32, as our engine runs it.

Source: https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/zero/stage_1_and_2.py and stage3.py.
"""

from dataclasses import dataclass, replace

from nvfp4_train.analysis.plan.layout import PARAMETERS_SHARDED, Layout
from nvfp4_train.analysis.plan.memory import GRADIENT_BYTES, Memory
from nvfp4_train.analysis.plan.parameters import MASTER_BYTES
from nvfp4_train.model.hybrid import HybridLM
from nvfp4_train.optim.groups import split_by_decay

ALIGNMENT = 2  # a flat group of stage 1 or 2 is filled up to a multiple of so many elements per rank
STEP_BYTES = 4  # an FP32 counter for each flat group of the optimizer
BUCKETS_THAT_OVERLAP = 2  # one is reduced while the other one fills


@dataclass(frozen=True, kw_only=True)
class ZeroElements:
    """Elements of a model on one rank.

    Args:
        partition: That the rank updates.
        whole: Of all parameters, as they lie in flat groups.
        persistent: Of the parameters that stage 3 does not shard while it computes.
        num_groups: Groups of the optimizer.
    """

    partition: int
    whole: int
    persistent: int
    num_groups: int


def zero_elements(model: HybridLM, layout: Layout) -> ZeroElements:
    """Count the elements of a whole model, on any device; stages 1 and 2 cut flat groups, stage 3 each parameter."""
    assert layout.zero is not None
    ranks, decay = layout.dp_shard, split_by_decay(model)
    groups = [[value.numel() for value in group.values()] for group in (decay.decayed, decay.not_decayed) if group]
    if layout.zero.stage < PARAMETERS_SHARDED:
        flat = sum(_filled_up(sum(group), ALIGNMENT * ranks) for group in groups)
        return ZeroElements(partition=flat // ranks, whole=flat, persistent=0, num_groups=len(groups))
    sizes = [size for group in groups for size in group]
    return ZeroElements(
        partition=sum(_filled_up(size, ranks) // ranks for size in sizes),
        whole=sum(sizes),
        persistent=sum(size for size in sizes if size < layout.zero.persistent_below),
        num_groups=len(groups),
    )


def zero_memory(torch_memory: Memory, elements: ZeroElements, layout: Layout, *, largest_block: int) -> Memory:
    """Return the memory of a rank of DeepSpeed, given that of a rank of the torch engine.

    Activations, quantized weights and workspace are the same.

    Args:
        torch_memory: Of one rank.
        elements: Of the model.
        layout: With ``zero``.
        largest_block: Elements of the block that has most.
    """
    zero = layout.zero
    assert zero is not None
    masters, gradients = MASTER_BYTES * elements.partition, GRADIENT_BYTES * elements.partition
    state = 2 * MASTER_BYTES * elements.partition + STEP_BYTES * elements.num_groups
    on_host = masters + state + gradients if zero.offloads_optimizer else 0
    if zero.stage < PARAMETERS_SHARDED:
        gathered = MASTER_BYTES * elements.whole
        accumulated = GRADIENT_BYTES * (elements.whole if zero.stage == 1 else largest_block)
    else:
        living = min(elements.whole, largest_block + zero.prefetch_bucket + elements.persistent)
        gathered = MASTER_BYTES * max(living, elements.persistent)
        accumulated = GRADIENT_BYTES * largest_block
        if zero.offloads_parameters:
            on_host += masters
        elif zero.offloads_optimizer:  # the shards that are gathered stay beside the masters on the host
            gathered += masters
    buckets = BUCKETS_THAT_OVERLAP if zero.overlaps else 1
    return replace(
        torch_memory,
        masters=0 if zero.offloads_optimizer else masters,
        gradients=0 if zero.offloads_optimizer else gradients,
        optimizer=0 if zero.offloads_optimizer else state,
        gathered_weights=gathered,
        accumulated_gradients=accumulated,
        communication=buckets * GRADIENT_BYTES * zero.reduce_bucket if layout.dp_shard > 1 else 0,
        host=on_host,
    )


def _filled_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
