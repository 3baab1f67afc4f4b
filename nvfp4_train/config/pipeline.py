"""Schedules of a pipeline, and what each asks of stages, microbatches and the model."""

from enum import StrEnum
from typing import TYPE_CHECKING

from nvfp4_train.config.batch import BatchConfig
from nvfp4_train.config.pattern import SEGMENT, pattern_fault
from nvfp4_train.config.problem import Problem, findings

if TYPE_CHECKING:
    from nvfp4_train.config.train import TrainConfig

# Order in which the stages of a pipeline run their microbatches. The functional form, because of `1f1b`.
PipelineSchedule = StrEnum(
    "PipelineSchedule",
    {
        "gpipe": "gpipe",  # all forwards, then all backwards
        "1f1b": "1f1b",  # backwards as early as they can
        "interleaved": "interleaved",  # 1f1b with several stages per rank: shorter bubbles, more messages
        "zero_bubble": "zero_bubble",  # either of the two, with the GEMMs of weight gradients moved into the bubbles
        "zbv": "zbv",  # zero bubble with two stages per rank, there and back
    },
)
ONE_STAGE = (PipelineSchedule.gpipe, PipelineSchedule["1f1b"])
IN_ROUNDS = (PipelineSchedule.interleaved, PipelineSchedule.zero_bubble)


def stages_fault(schedule: PipelineSchedule, *, pp_degree: int, stages_per_rank: int) -> str:
    """Return the rule about stages that a layout violates, or an empty string."""
    if pp_degree == 1:
        return "" if stages_per_rank == 1 else "without a pipeline (pp_degree 1) must be 1"
    if schedule in ONE_STAGE and stages_per_rank != 1:
        return f"the schedule {schedule.value} has one stage per rank; interleaved and zero_bubble have several"
    if schedule is PipelineSchedule.interleaved and stages_per_rank < 2:
        return "the schedule interleaved needs at least 2; with one stage per rank it is 1f1b"
    if schedule is PipelineSchedule.zbv and stages_per_rank != 2:
        return "the schedule zbv has exactly 2 stages per rank"
    return ""


def microbatches_fault(schedule: PipelineSchedule, *, pp_degree: int, num_microbatches: int) -> str:
    """Return the rule about the microbatches of a rank in a step that a layout violates, or an empty string."""
    if pp_degree <= 1 or schedule is PipelineSchedule.gpipe:
        return ""
    found = f"a step has {num_microbatches} microbatches per data rank, "
    if schedule not in IN_ROUNDS:
        least = 2 * pp_degree if schedule is PipelineSchedule.zbv else pp_degree
        return "" if num_microbatches >= least else found + f"the schedule {schedule.value} needs at least {least}"
    if num_microbatches < pp_degree:
        return found + f"the schedule {schedule.value} needs at least pp_degree ({pp_degree})"
    rounds = num_microbatches // pp_degree
    if num_microbatches % rounds:
        return found + (
            f"which the schedule {schedule.value} cannot divide into {rounds} equal rounds of about pp_degree "
            f"({pp_degree})"
        )
    return ""


def pipeline_problems(cfg: "TrainConfig") -> list[Problem]:
    """Return every violated rule about pipelines that needs values of two groups."""
    return findings(cfg, _stage_problems, _balance_problems, _end_problems, _microbatch_problems)


def _stage_problems(cfg: "TrainConfig") -> list[Problem]:
    if cfg.parallel.pp_degree <= 1 or pattern_fault(cfg.model.pattern):
        return []
    parallel = cfg.parallel
    stages = (
        f"{parallel.num_stages} stages (pp_degree {parallel.pp_degree} x stages_per_rank {parallel.stages_per_rank})"
    )
    segments, num_blocks = cfg.model.layer_pattern.segments, len(cfg.model.layer_kinds)
    rule, fix = "", "lower parallel.pp_degree or parallel.stages_per_rank"
    if len(segments) > 1 and len(segments) != cfg.parallel.num_stages:
        rule = f"has {len(segments)} segments between {SEGMENT}, and the pipeline has {stages}"
        fix = f"change one of them, or leave the {SEGMENT} out to have the stages balanced"
    elif not all(segments):
        rule = f"segment {segments.index(())} is empty, and every pipeline stage needs at least one block"
        fix = f"move a {SEGMENT}"
    elif num_blocks < cfg.parallel.num_stages:
        rule = f"{num_blocks} blocks do not fill {stages}; every stage needs at least one"
    return [Problem(key="model.pattern", value=cfg.model.pattern, rule=rule, fix=fix)] if rule else []


def _balance_problems(cfg: "TrainConfig") -> list[Problem]:
    parallel = cfg.parallel
    if parallel.pp_degree <= 1 or parallel.stage_balance.value == "flops" or SEGMENT not in cfg.model.pattern:
        return []
    return [
        Problem(
            key="parallel.stage_balance",
            value=parallel.stage_balance.value,
            rule=f"model.pattern ({cfg.model.pattern}) says with {SEGMENT} where stages end, so nothing is balanced",
            fix=f"leave it at flops, or leave the {SEGMENT} out",
        )
    ]


def _end_problems(cfg: "TrainConfig") -> list[Problem]:
    """The V schedule has both ends of the model on one rank, which would need two copies of one parameter."""
    if pattern_fault(cfg.model.pattern):
        return []
    needs = [
        *(["tied embeddings"] if cfg.model.tie_embeddings else []),
        *(["multi-token prediction"] if cfg.model.layer_pattern.num_mtp_depths else []),
    ]
    if cfg.parallel.pp_degree <= 1 or cfg.parallel.pipeline_schedule is not PipelineSchedule.zbv or not needs:
        return []
    return [
        Problem(
            key="parallel.pipeline_schedule",
            value=cfg.parallel.pipeline_schedule.value,
            rule=f"zbv puts both ends of the model on one rank, and {' and '.join(needs)} need the embedding at both",
            fix="use zero_bubble, whose ends are on different ranks",
        )
    ]


def _microbatch_problems(cfg: "TrainConfig") -> list[Problem]:
    """As far as the config says how many data ranks there are."""
    parallel, batch = cfg.parallel, cfg.batch
    if parallel.dp_shard_degree < 1:
        return []
    found = step_problems(
        batch,
        schedule=parallel.pipeline_schedule,
        pp_degree=parallel.pp_degree,
        dp_degree=parallel.dp_replicate_degree * parallel.dp_shard_degree,
    )
    return [problem.below("batch") for problem in found]


def step_problems(batch: BatchConfig, *, schedule: PipelineSchedule, pp_degree: int, dp_degree: int) -> list[Problem]:
    """Return what is wrong with the microbatches of the step sizes of a run; sizes that do not divide are left out."""
    unit = max(batch.micro_batch_size * dp_degree, 1)
    problems: dict[str, Problem] = {}
    for size in batch.step_sizes():
        rule = microbatches_fault(schedule, pp_degree=pp_degree, num_microbatches=size // unit)
        if rule and size % unit == 0:
            key = "global_batch_size" if size == batch.global_batch_size else "ramp.increment"
            value = batch.global_batch_size if size == batch.global_batch_size else batch.ramp.increment
            text = rule if size == batch.global_batch_size else f"of {size} sequences: {rule}"
            problems.setdefault(key, Problem(key=key, value=value, rule=text, fix=_MICROBATCH_FIX))
    return list(problems.values())


_MICROBATCH_FIX = "change it, batch.micro_batch_size, parallel.pp_degree or parallel.pipeline_schedule"
