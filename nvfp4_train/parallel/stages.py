"""Which blocks each pipeline stage has, and which rank has each stage. Needs no ranks, so a plan can ask too."""

from dataclasses import dataclass
from itertools import pairwise

from nvfp4_train.config.parallel import ParallelConfig
from nvfp4_train.config.pattern import LayerPattern
from nvfp4_train.config.pipeline import PipelineSchedule
from nvfp4_train.model.flops import count_flops
from nvfp4_train.model.hybrid import HybridLM


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """One stage.

    Args:
        index: Of the stage, from 0.
        rank: Its place along the axis `pp`.
        blocks: Indices of its blocks in the whole model.
        cost: Of a forward and a backward over one sequence, with embedding and head where it has them; FLOPs, or
            seconds where those were measured.
        is_first: Whether it has the embedding.
        is_last: Whether it has the final norm, the head and multi-token prediction.
    """

    index: int
    rank: int
    blocks: range
    cost: float
    is_first: bool
    is_last: bool


@dataclass(frozen=True, kw_only=True)
class BlockCosts:
    """FLOPs, or seconds, of a forward and a backward over one sequence.

    Args:
        blocks: Of each block of the main model.
        before: Of the embedding; its FLOPs are one operation per element that is read and per element of the gradient
            that is written, since it multiplies nothing.
        after: Of the output head and multi-token prediction.
    """

    blocks: list[float]
    before: float
    after: float


def plan_stages(
    model: HybridLM, cfg: ParallelConfig, *, sequence_length: int, costs: BlockCosts | None = None
) -> list[StagePlan]:
    """Divide a model: where its pattern has `|`, there; else so that the most expensive stage is as cheap as possible.

    A pure function of its arguments: every rank, and a plan without ranks, finds the same.

    Args:
        model: Whole, on any device, meta included.
        cfg: Degrees and schedule.
        sequence_length: Tokens of a sequence, which decide what attention costs.
        costs: What was measured; None: FLOPs.

    Raises:
        ValueError: for segments that are not as many as stages, or a stage without blocks.
    """
    num_stages = cfg.num_stages
    costs = costs or block_costs(model, sequence_length=sequence_length)
    pattern = model.cfg.layer_pattern
    if len(pattern.segments) > 1 and num_stages > 1:
        parts = _segments(pattern, num_stages=num_stages)
    else:
        parts = balance(costs, num_stages=num_stages)
    assert [index for part in parts for index in part] == list(range(len(costs.blocks))), "a block has no owner, or two"
    ranks = stage_ranks(cfg)
    return [
        StagePlan(
            index=index,
            rank=ranks[index],
            blocks=part,
            cost=sum(costs.blocks[block] for block in part)
            + (costs.before if index == 0 else 0.0)
            + (costs.after if index == num_stages - 1 else 0.0),
            is_first=index == 0,
            is_last=index == num_stages - 1,
        )
        for index, part in enumerate(parts)
    ]


def stage_ranks(cfg: ParallelConfig) -> list[int]:
    """Return the place of each stage along the axis `pp`: round and round, or there and back for the V schedule."""
    ranks: list[int] = []
    for lap in range(cfg.stages_per_rank):
        there = list(range(cfg.pp_degree))
        ranks += reversed(there) if cfg.pipeline_schedule is PipelineSchedule.zbv and lap % 2 else there
    return ranks


def block_costs(model: HybridLM, *, sequence_length: int) -> BlockCosts:
    """Count what the modules of each block execute in a forward and a backward over one sequence.

    Args:
        model: Whole, on any device, meta included.
        sequence_length: Tokens of the sequence, a single document.
    """
    blocks = [0.0] * len(model.cfg.layer_kinds)
    after = 0.0
    for row in count_flops(model, document_lengths=[sequence_length]).rows:
        cost = row.executed_forward + row.executed_backward
        name, _, rest = row.module.partition(".")
        if name == "blocks":
            blocks[int(rest.partition(".")[0])] += cost
        else:  # the head, which may be the embedding's weight, and multi-token prediction
            after += cost
    lookups = 2.0 * sequence_length * model.cfg.d_model + model.embedding.weight.numel()
    return BlockCosts(blocks=blocks, before=lookups, after=after)


def balance(costs: BlockCosts, *, num_stages: int) -> list[range]:
    """Divide the blocks into contiguous stages, none empty, so that the largest cost of a stage is the least possible.

    Of equally good divisions it takes the one whose stages, from the last to the first, begin as early as possible.

    Raises:
        ValueError: if there are fewer blocks than stages.
    """
    num_blocks = len(costs.blocks)
    if num_blocks < num_stages:
        raise ValueError(
            f"{num_blocks} blocks do not fill {num_stages} pipeline stages; every stage needs at least one"
        )
    sums = [0.0]
    for cost in costs.blocks:
        sums.append(sums[-1] + cost)
    # best[end]: the largest cost if the first `end` blocks fill the stages so far. starts[stage][end]: where the last
    # of those stages begins.
    best = [costs.before + total for total in sums]
    starts = [[0] * (num_blocks + 1)]
    for stage in range(1, num_stages):
        after = costs.after if stage == num_stages - 1 else 0.0
        largest, begin = [float("inf")] * (num_blocks + 1), [0] * (num_blocks + 1)
        for end in range(stage + 1, num_blocks + 1):
            choices = ((max(best[start], sums[end] - sums[start] + after), start) for start in range(stage, end))
            largest[end], begin[end] = min(choices)
        best = largest
        starts.append(begin)
    bounds = [num_blocks]
    for stage in range(num_stages - 1, 0, -1):
        bounds.append(starts[stage][bounds[-1]])
    bounds = [0, *reversed(bounds)]
    return [range(start, end) for start, end in pairwise(bounds)]


def _segments(pattern: LayerPattern, *, num_stages: int) -> list[range]:
    if len(pattern.segments) != num_stages:
        raise ValueError(
            f"model.pattern has {len(pattern.segments)} segments between |, but the pipeline has {num_stages} stages "
            "(pp_degree x stages_per_rank); change one of them, or leave the | out to have the stages balanced"
        )
    parts, start = [], 0
    for index, segment in enumerate(pattern.segments):
        if not segment:
            raise ValueError(
                f"segment {index} of model.pattern is empty; every pipeline stage needs at least one block"
            )
        parts.append(range(start, start + len(segment)))
        start += len(segment)
    return parts
