"""Layouts that fit, ranked, and why the others do not."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from nvfp4_train.analysis.plan.communication import spans
from nvfp4_train.analysis.plan.layout import Layout, Schedule, layout_problems
from nvfp4_train.analysis.plan.planner import Plan, Planner
from nvfp4_train.config.parallel import ActivationCheckpoint
from nvfp4_train.config.pattern import LayerKind

MAX_TP, MAX_CP, MAX_PP, MAX_VIRTUAL_STAGES = 16, 16, 32, 4
MICRO_BATCHES = (1, 2, 4, 8)
# What is recomputed, and whether gathered weights are freed: memory gets smaller in this order, and a step slower.
TRADES = (
    (ActivationCheckpoint.none, False),
    (ActivationCheckpoint.none, True),
    (ActivationCheckpoint.selective, True),
    (ActivationCheckpoint.block, False),
    (ActivationCheckpoint.block, True),
)


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """Why layouts were left out.

    Args:
        reason: In words.
        count: How many.
        example: One of them.
    """

    reason: str
    count: int
    example: str


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search found.

    Args:
        plans: The fastest layouts, best first.
        fitting: How many layouts fit, of all that were looked at.
        looked_at: How many were looked at.
        rejected: Why the others do not fit, most frequent first.
    """

    plans: list[Plan]
    fitting: int
    looked_at: int
    rejected: list[Rejected]


def search(planner: Planner, start: Layout, *, devices: int, best: int = 5) -> Found:
    """Look at the layouts of a run on so many devices.

    Sequences, their length and the size of a step stay as configured, so that what is learnt does not change. A model
    whose pattern has ``|`` keeps its stages. Recomputing is tried only as far as memory asks for it: what keeps more is
    faster.

    Args:
        planner: Of the model and the hardware.
        start: As configured.
        devices: To be filled.
        best: How many plans to return.
    """
    reasons: Counter[str] = Counter()
    examples: dict[str, str] = {}
    fitting: list[tuple[float, Layout]] = []
    looked_at = 0

    def reject(layout: Layout, reason: str) -> None:
        reasons[reason] += 1
        examples.setdefault(reason, layout.describe())

    for layout in _candidates(planner, start, devices=devices):
        looked_at += 1
        problems = layout_problems(layout, planner.model, devices=devices)
        reason = f"{problems[0].key} {problems[0].rule}" if problems else _link_reason(planner, layout)
        if reason:
            reject(layout, reason)
            continue
        chosen = _cheapest_that_fits(planner, layout)
        if isinstance(chosen, str):
            reject(layout, chosen)
        else:
            fitting.append((planner.step_time(chosen).total, chosen))
    fitting.sort(key=lambda pair: pair[0])
    return Found(
        plans=_plans(planner, [layout for _, layout in fitting], best=best),
        fitting=len(fitting),
        looked_at=looked_at,
        rejected=[
            Rejected(reason=reason, count=count, example=examples[reason]) for reason, count in reasons.most_common()
        ],
    )


def _plans(planner: Planner, ranked: list[Layout], *, best: int) -> list[Plan]:
    """Plan the first layouts, of those that differ in size of microbatch and stages of a rank the fastest only."""
    plans: dict[Layout, Plan] = {}
    for layout in ranked:
        degrees = replace(
            layout,
            micro_batch_size=1,
            num_virtual_stages=1,
            schedule=Schedule.one_f_one_b,
            checkpoint=ActivationCheckpoint.none,
            reshards=False,
        )
        if degrees not in plans:
            plan = planner.plan(layout)
            if plan.fits:  # every pipeline rank has been looked at now
                plans[degrees] = plan
        if len(plans) == best:
            break
    return list(plans.values())


def _powers(limit: int) -> Iterator[int]:
    value = 1
    while value <= limit:
        yield value
        value *= 2


def _candidates(planner: Planner, start: Layout, *, devices: int) -> Iterator[Layout]:
    """All degrees that are powers of two; replicas only where a group of ranks would leave its domain otherwise."""
    model, domain = planner.model, planner.machine.hardware.domain
    segments = len(model.layer_pattern.segments)
    has_experts = LayerKind.moe in {*model.layer_kinds, *model.layer_pattern.mtp}
    for tp in _powers(MAX_TP):
        for cp in _powers(MAX_CP):
            for pp in _powers(MAX_PP):
                if devices % (tp * cp * pp):
                    continue
                dp = devices // (tp * cp * pp)
                replicas = {1, max(1, dp * cp * tp // domain)} if dp * cp * tp > domain else {1}
                for replicate in sorted(copies for copies in replicas if dp % copies == 0):
                    base = replace(
                        start, tp=tp, cp=cp, pp=pp, dp_replicate=replicate, dp_shard=dp // replicate, ep=1
                    )
                    experts = _powers(model.moe.num_experts) if has_experts else iter((1,))
                    for ep in experts:
                        if base.fsdp % ep == 0:
                            yield from _variants(replace(base, ep=ep), segments=segments)


def _variants(layout: Layout, *, segments: int) -> Iterator[Layout]:
    virtual = [1] if layout.pp == 1 else list(_powers(MAX_VIRTUAL_STAGES))
    if segments > 1 and layout.pp > 1:
        virtual = [segments // layout.pp] if segments % layout.pp == 0 else [1]
    for size in MICRO_BATCHES:
        for stages in virtual:
            schedule = Schedule.interleaved if stages > 1 else Schedule.one_f_one_b
            yield replace(layout, micro_batch_size=size, num_virtual_stages=stages, schedule=schedule)


def _link_reason(planner: Planner, layout: Layout) -> str:
    """Groups that wait for each other in every block must lie in one domain."""
    domain = planner.machine.hardware.domain
    for axis in ("tp", "cp"):
        if getattr(layout, axis) > 1 and spans(layout)[axis] > domain:
            return f"{axis} leaves the NVLink domain of {domain}: it waits in every block"
    return ""


def _cheapest_that_fits(planner: Planner, layout: Layout) -> Layout | str:
    """Return the layout that trades least speed for memory and fits, or what takes the memory."""
    problems = planner.width_problems(layout)
    if problems:
        return f"{problems[0].key.split('.', 2)[-1]} of a tp rank does not fit the recipe's blocks"
    memory = planner.machine.hardware.memory
    smallest = replace(layout, checkpoint=TRADES[-1][0], reshards=TRADES[-1][1])
    needed = planner.rank_memory(smallest)
    if needed.total > memory:
        kind = max(needed.by_kind, key=lambda name: needed.by_kind[name])
        return f"more than the {memory / 1e9:.0f} GB of a device, most of it {kind}"
    for checkpoint, reshards in TRADES[:-1]:
        tried = replace(layout, checkpoint=checkpoint, reshards=reshards)
        if planner.rank_memory(tried).total <= memory:
            return tried
    return smallest
