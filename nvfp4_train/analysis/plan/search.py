"""The fastest layouts that fit, and why those that would be faster do not."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from nvfp4_train.analysis.plan.communication import spans
from nvfp4_train.analysis.plan.layout import Layout, Schedule, layout_problems, model_problems
from nvfp4_train.analysis.plan.planner import Plan, Planner
from nvfp4_train.config.parallel import ActivationCheckpoint
from nvfp4_train.config.pattern import LayerKind

MAX_TP, MAX_CP, MAX_PP, MAX_VIRTUAL_STAGES = 8, 8, 16, 4
MICRO_BATCHES = (1, 2, 4)
# What is recomputed, and whether gathered weights are freed: memory gets smaller in this order, and a step slower.
TRADES = (
    (ActivationCheckpoint.none, False),
    (ActivationCheckpoint.none, True),
    (ActivationCheckpoint.selective, True),
    (ActivationCheckpoint.block, False),
    (ActivationCheckpoint.block, True),
)
WAITING_AXES = ("tp", "cp")  # of which every block waits for every rank
SERVER = 16  # up to this many devices a domain is a server, which the experts of a large model have to leave


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
        plans: The fastest layouts that fit, best first.
        looked_at: Layouts that shapes and links allow, and those that they do not.
        rejected: Why layouts do not fit, most frequent first.
    """

    plans: list[Plan]
    looked_at: int
    rejected: list[Rejected]


@dataclass
class _Reasons:
    """Counts reasons and keeps an example of each."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, layout: Layout) -> None:
        self.counts[reason] += 1
        self.examples.setdefault(reason, layout.describe())

    def listed(self) -> list[Rejected]:
        return [
            Rejected(reason=reason, count=count, example=self.examples[reason])
            for reason, count in self.counts.most_common()
        ]


def search(planner: Planner, start: Layout, *, devices: int, best: int = 5) -> Found:
    """Look at the layouts of a run on so many devices.

    Sequences, their length and the size of a step stay as configured, so that what is learnt does not change. Layouts
    are tried from the fastest on, without looking at memory; what does not fit recomputes more, until it fits or is
    given up. It ends when no other layout can be faster than the best ones: the rest is not looked at, because memory
    only makes it slower.

    Args:
        planner: Of the model and the hardware.
        start: As configured.
        devices: To be filled.
        best: How many plans to return.
    """
    reasons = _Reasons()
    timed: list[tuple[float, Layout]] = []
    looked_at = 0
    for layout in _candidates(planner, start, devices=devices):
        looked_at += 1
        reason = _reason(planner, layout, devices=devices)
        if reason:
            reasons.add(reason, layout)
        else:
            timed.append((planner.quick_seconds(layout), layout))
    timed.sort(key=lambda pair: pair[0])
    plans: dict[Layout, Plan] = {}
    for seconds, layout in timed:
        worst = sorted(plan.time.total for plan in plans.values())[:best]
        if len(worst) == best and seconds > worst[-1]:
            break
        plan = _cheapest_that_fits(planner, layout)
        if isinstance(plan, str):
            reasons.add(plan, layout)
            continue
        degrees = _degrees(layout)
        if degrees not in plans or plan.time.total < plans[degrees].time.total:
            plans[degrees] = plan
    ranked = sorted(plans.values(), key=lambda plan: plan.time.total)
    return Found(plans=ranked[:best], looked_at=looked_at, rejected=reasons.listed())


def _degrees(layout: Layout) -> Layout:
    """Layouts that differ in the rest only are one answer."""
    return replace(layout, micro_batch_size=1, num_virtual_stages=1, schedule=Schedule.one_f_one_b)


def _powers(limit: int) -> Iterator[int]:
    value = 1
    while value <= limit:
        yield value
        value *= 2


def _candidates(planner: Planner, start: Layout, *, devices: int) -> Iterator[Layout]:
    """All degrees that are powers of two, with the trade that is fastest."""
    if start.zero is not None:  # shards over all ranks, whatever the stage
        whole = replace(start, pp=1, dp_replicate=1, dp_shard=devices, cp=1, tp=1, ep=1)
        checkpoint = TRADES[0][0]
        yield from (replace(whole, checkpoint=checkpoint, micro_batch_size=size) for size in MICRO_BATCHES)
        return
    checkpoint, reshards = TRADES[0]
    start = replace(start, checkpoint=checkpoint, reshards=reshards, ep=1)
    start = replace(start, num_virtual_stages=1, schedule=Schedule.one_f_one_b)
    for tp in _powers(MAX_TP):
        for cp in _powers(MAX_CP):
            shared = replace(start, tp=tp, cp=cp, pp=1, dp_replicate=1, dp_shard=max(devices // (tp * cp), 1))
            if model_problems(shared, planner.model):
                yield shared
                continue
            for pp in _powers(MAX_PP):
                if devices % (tp * cp * pp) == 0:
                    yield from _data_degrees(planner, replace(shared, pp=pp), ranks=devices // (tp * cp * pp))


def _data_degrees(planner: Planner, layout: Layout, *, ranks: int) -> Iterator[Layout]:
    """Shard over all data ranks, or over those of a domain with copies on the others; experts over any of them."""
    model, domain = planner.model, planner.machine.hardware.domain
    inside = max(power for power in _powers(domain) if power <= domain)
    copies = max(1, ranks * layout.cp * layout.tp // inside)
    has_experts = LayerKind.moe in {*model.layer_kinds, *model.layer_pattern.mtp}
    for replicate in sorted({1, copies}):
        if ranks % replicate:
            continue
        data = replace(layout, dp_replicate=replicate, dp_shard=ranks // replicate)
        for size in MICRO_BATCHES:
            sized, segments = replace(data, micro_batch_size=size), len(model.layer_pattern.segments)
            fewest = next(_with_stages(sized, segments=segments))
            if layout_problems(fewest, model, devices=fewest.devices):
                yield fewest  # whatever the experts, and with more stages too
                continue
            for ep in _powers(model.moe.num_experts if has_experts else 1):
                if data.fsdp % ep == 0:
                    yield from _with_stages(replace(sized, ep=ep), segments=segments)


def _with_stages(layout: Layout, *, segments: int) -> Iterator[Layout]:
    virtual = [1] if layout.pp == 1 else list(_powers(MAX_VIRTUAL_STAGES))
    if segments > 1 and layout.pp > 1:
        virtual = [segments // layout.pp] if segments % layout.pp == 0 else [1]
    for stages in virtual:
        schedule = Schedule.interleaved if stages > 1 else Schedule.one_f_one_b
        yield replace(layout, num_virtual_stages=stages, schedule=schedule)


def _reason(planner: Planner, layout: Layout, *, devices: int) -> str:
    """Return what forbids a layout whatever the memory, or an empty string."""
    problems = layout_problems(layout, planner.model, devices=devices)
    if problems:
        return re.sub(r"\b\d+\b", "N", f"{problems[0].key} {problems[0].rule}")
    domain = planner.machine.hardware.domain
    axes = WAITING_AXES if domain <= SERVER else (*WAITING_AXES, "ep")
    for axis in axes:
        if getattr(layout, axis) > 1 and spans(layout)[axis] > domain:
            return f"{axis} leaves the domain of {domain} devices, and every block waits for it"
    widths = planner.width_problems(layout)
    if widths:
        return f"{widths[0].key.split('.', 2)[-1]} of a tp rank does not fit the recipe's blocks"
    return ""


def _cheapest_that_fits(planner: Planner, layout: Layout) -> Plan | str:
    """Return the plan that trades least speed for memory and fits, or what takes the memory."""
    memory = planner.machine.hardware.memory
    trades = _trades(layout)
    needed = planner.rank_memory(trades[-1])
    if needed.total <= memory:
        for tried in trades:
            if planner.rank_memory(tried).total <= memory:
                plan = planner.plan(tried)
                if plan.fits:  # every pipeline rank has been looked at now
                    return plan
    kind = max(needed.by_kind, key=lambda name: needed.by_kind[name])
    return f"more than the {memory / 1e9:.0f} GB of a device however much is recomputed, most of it {kind}"


def _trades(layout: Layout) -> list[Layout]:
    """Return the layout with more and more that is recomputed; what stays gathered is DeepSpeed's own business."""
    if layout.zero is not None:
        modes = dict.fromkeys(checkpoint for checkpoint, _ in TRADES)
        return [replace(layout, checkpoint=checkpoint) for checkpoint in modes]
    return [replace(layout, checkpoint=checkpoint, reshards=reshards) for checkpoint, reshards in TRADES]
