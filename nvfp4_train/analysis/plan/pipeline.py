"""What a pipeline schedule costs: microbatches in flight, and time that ranks wait.

The orders below are those in which PyTorch's schedules run their stages; a test holds them against each other.

Source: https://arxiv.org/abs/2104.04473, section 2.2, for 1F1B and interleaved stages; https://arxiv.org/abs/2401.10241
for zero-bubble schedules and the V schedule.
"""

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from functools import cache

from nvfp4_train.analysis.plan.layout import Layout, Schedule

APART = (Schedule.zero_bubble, Schedule.zbv)  # gradients of inputs and of weights are computed apart
ENOUGH = 4  # rounds of microbatches: with more of them a rank holds no more and waits no longer


class Pass(Enum):
    """What a stage does with a microbatch."""

    forward = "F"
    backward = "B"
    backward_input = "I"
    backward_weight = "W"


# A backward takes as long as two forwards.
SECONDS = {Pass.forward: 1, Pass.backward: 2, Pass.backward_input: 1, Pass.backward_weight: 1}


@dataclass(frozen=True)
class Task:
    """One pass of one microbatch through one of the stages of a rank.

    Args:
        work: Which pass.
        lap: The stage, counted on its rank.
        microbatch: From 0.
    """

    work: Pass
    lap: int
    microbatch: int


def peak_bytes(layout: Layout, *, rank: int, per_lap: list[float]) -> float:
    """Return the bytes of activations that a pipeline rank holds at most.

    A gradient of weights that waits keeps two operands of each product; it is counted as all that the forward kept,
    which is about as much.

    Args:
        layout: With the schedule and the microbatches of a step.
        rank: Along pp.
        per_lap: Bytes that a microbatch keeps in each stage of the rank.
    """
    if layout.pp == 1:
        return sum(per_lap)
    if layout.schedule is Schedule.gpipe:
        return layout.num_microbatches * sum(per_lap)
    return max(
        sum(count * size for count, size in zip(held, per_lap, strict=True))
        for held in _most_held(layout.schedule, layout.pp, rank, _shorter(layout), layout.num_virtual_stages)
    )


def _shorter(layout: Layout) -> int:
    """Return how many microbatches show all that more of them would: a few rounds of as many."""
    rounds = max(1, layout.num_microbatches // layout.pp)
    return layout.num_microbatches // rounds * min(rounds, ENOUGH)


@cache
def _most_held(schedule: Schedule, pp: int, rank: int, count: int, laps: int) -> frozenset[tuple[int, ...]]:
    """Return how many microbatches each stage of a rank holds, at all times when no other time has more of all."""
    held: Counter[int] = Counter()
    found = set()
    for task in order(schedule, pp=pp, rank=rank, count=count, laps=laps):
        if task.work is Pass.forward:
            held[task.lap] += 1
            found.add(tuple(held[lap] for lap in range(laps)))
        elif task.work in (Pass.backward, Pass.backward_weight):
            held[task.lap] -= 1
    return frozenset(one for one in found if not any(_is_more(other, than=one) for other in found))


def _is_more(held: tuple[int, ...], *, than: tuple[int, ...]) -> bool:
    return held != than and all(more >= less for more, less in zip(held, than, strict=True))


def bubble(layout: Layout) -> float:
    """Return the time that a rank waits, in units of the time that it computes; stages are taken to be alike."""
    if layout.pp == 1:
        return 0.0
    laps, count = layout.num_virtual_stages, layout.num_microbatches
    if layout.schedule not in APART:
        return (layout.pp - 1) / (laps * count)
    return _waiting(layout.schedule, layout.pp, _shorter(layout), laps) / (3 * laps * count)


@cache
def _waiting(schedule: Schedule, pp: int, count: int, laps: int) -> float:
    """Run a schedule and return how long the rank that ends last waits, in units of a forward of a stage."""
    orders = [order(schedule, pp=pp, rank=rank, count=count, laps=laps) for rank in range(pp)]
    ends: dict[tuple[Pass, int, int], int] = {}
    places, clocks = [0] * pp, [0] * pp
    while any(place < len(tasks) for place, tasks in zip(places, orders, strict=True)):
        for rank, tasks in enumerate(orders):
            while places[rank] < len(tasks):
                task = tasks[places[rank]]
                ready = _ready(task, ends, schedule=schedule, pp=pp, rank=rank, laps=laps)
                if ready is None:
                    break
                clocks[rank] = max(clocks[rank], ready) + SECONDS[task.work]
                ends[task.work, _stage(schedule, pp, rank, task.lap), task.microbatch] = clocks[rank]
                places[rank] += 1
    return max(clocks) - 3 * laps * count


def _ready(
    task: Task, ends: dict[tuple[Pass, int, int], int], *, schedule: Schedule, pp: int, rank: int, laps: int
) -> int | None:
    """Return when a task has its inputs; None while it is not known."""
    stage = _stage(schedule, pp, rank, task.lap)
    match task.work:
        case Pass.forward if stage > 0:
            return ends.get((Pass.forward, stage - 1, task.microbatch))
        case Pass.backward | Pass.backward_input if stage < pp * laps - 1:
            return ends.get((task.work, stage + 1, task.microbatch))
    return 0


def _stage(schedule: Schedule, pp: int, rank: int, lap: int) -> int:
    is_back = schedule is Schedule.zbv and lap % 2 == 1
    return lap * pp + (pp - 1 - rank if is_back else rank)


def order(schedule: Schedule, *, pp: int, rank: int, count: int, laps: int) -> list[Task]:
    """Return what a rank does in a step, in its order.

    Args:
        schedule: Which one.
        pp: Pipeline ranks.
        rank: Of them.
        count: Microbatches of a step.
        laps: Stages of a rank.
    """
    match schedule:
        case Schedule.gpipe:
            forwards = [Task(Pass.forward, 0, index) for index in range(count)]
            return forwards + [Task(Pass.backward, 0, index) for index in range(count)]
        case Schedule.one_f_one_b:
            return _alternating(warm=min(count, pp - rank) - 1, per_round=count, count=count, laps=1)
        case Schedule.zbv:
            return _there_and_back(pp=pp, rank=rank, count=count)
    per_round = count // max(1, count // pp)
    hops = (pp - 1 - rank) * (1 if schedule is Schedule.zero_bubble else 2)
    warm = min((laps - 1) * per_round + hops, count * laps)
    tasks = _alternating(warm=warm, per_round=per_round, count=count, laps=laps)
    return _with_weights(tasks, later=rank) if schedule is Schedule.zero_bubble else tasks


def _alternating(*, warm: int, per_round: int, count: int, laps: int) -> list[Task]:
    """Some forwards, then forwards and backwards in turn, then the backwards that are left; rounds of microbatches."""

    def task(work: Pass, step: int) -> Task:
        lap = step // per_round % laps
        microbatch = step // (per_round * laps) * per_round + step % per_round
        return Task(work, lap if work is Pass.forward else laps - 1 - lap, microbatch)

    total = count * laps
    tasks = [task(Pass.forward, step) for step in range(warm)]
    for step in range(total - warm):
        tasks += [task(Pass.forward, warm + step), task(Pass.backward, step)]
    return tasks + [task(Pass.backward, step) for step in range(total - warm, total)]


def _with_weights(tasks: list[Task], *, later: int) -> list[Task]:
    """Divide backwards in two; the gradients of weights come so many backwards later."""
    found: list[Task] = []
    waiting: list[Task] = []
    for task in tasks:
        if task.work is Pass.forward:
            found.append(task)
            continue
        found.append(Task(Pass.backward_input, task.lap, task.microbatch))
        waiting.append(Task(Pass.backward_weight, task.lap, task.microbatch))
        if len(waiting) > later:
            found.append(waiting.pop(0))
    return found + waiting


def _there_and_back(*, pp: int, rank: int, count: int) -> list[Task]:
    """The V schedule: the second stage of a rank comes back, so that the last rank turns around."""
    planned = max(2 * pp - 1, count)
    tasks: list[Task] = []
    done: Counter[tuple[Pass, int]] = Counter()

    def add(*works: tuple[Pass, int]) -> None:
        for work, lap in works:
            tasks.append(Task(work, lap, done[work, lap]))
            done[work, lap] += 1

    def whole(lap: int) -> tuple[tuple[Pass, int], ...]:
        return (Pass.backward_input, lap), (Pass.backward_weight, lap)

    there, back = (Pass.forward, 0), (Pass.forward, 1)
    add(*[there] * (2 * (pp - rank) - 1))
    add(*[back, there] * rank)
    for _ in range(pp - rank):
        add(back, *whole(1))
    while done[back] < done[there] or done[there] < planned:
        if done[there] < planned:
            add(there)
        add(*whole(0), back, *whole(1))
    for _ in range(rank):
        add((Pass.backward_input, 0), (Pass.backward_input, 1))
    for _ in range(pp - rank):
        add(*whole(0))
    for lap in (1, 0):
        add(*[(Pass.backward_weight, lap)] * (done[Pass.backward_input, lap] - done[Pass.backward_weight, lap]))
    return [task for task in tasks if task.microbatch < count]
