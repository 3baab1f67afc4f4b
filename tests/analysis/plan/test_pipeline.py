"""Orders against PyTorch's; microbatches in flight and waiting time against a simulation."""

from dataclasses import replace
from typing import Any

import pytest
from torch.distributed.pipelining import (
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from nvfp4_train.analysis.plan.layout import Layout, Schedule, parallel_of
from nvfp4_train.analysis.plan.pipeline import Pass, bubble, order, peak_bytes
from nvfp4_train.parallel.stages import stage_ranks

LAYOUT = Layout(pp=4, micro_batch_size=1, global_batch_size=16, sequence_length=64)


def in_flight(layout: Layout, rank: int) -> float:
    """Microbatches that a rank holds, in units of all of its stages."""
    laps = layout.num_virtual_stages
    return peak_bytes(layout, rank=rank, per_lap=[1 / laps] * laps)


def pytorch_order(kind: type[Any], *, pp: int, rank: int, count: int, laps: int) -> list[tuple[int, str, int]]:
    """What a rank of a schedule of PyTorch does, which needs no ranks to be told."""
    schedule = object.__new__(kind)
    schedule.pp_group_size, schedule.n_local_stages, schedule.num_stages = pp, laps, pp * laps
    schedule._n_microbatches, schedule.microbatches_per_round = count, count // max(1, count // pp)
    actions = [action for action in schedule._calculate_single_rank_operations(rank) if action is not None]
    return [(action.stage_index, action.computation_type.value, action.microbatch_index) for action in actions]


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize(
    ("schedule", "kind", "laps"),
    [
        (Schedule.interleaved, ScheduleInterleaved1F1B, 2),
        (Schedule.interleaved, ScheduleInterleaved1F1B, 3),
        (Schedule.zero_bubble, ScheduleInterleavedZeroBubble, 1),
        (Schedule.zero_bubble, ScheduleInterleavedZeroBubble, 2),
        (Schedule.zbv, ScheduleZBVZeroBubble, 2),
    ],
)
def test_orders_are_those_of_pytorch(schedule: Schedule, kind: type[Any], laps: int, pp: int):
    layout = replace(LAYOUT, pp=pp, schedule=schedule, num_virtual_stages=laps)
    ranks = stage_ranks(parallel_of(layout))
    for count in (2 * pp, 3 * pp, 4 * pp):
        for rank in range(pp):
            stages = [stage for stage, owner in enumerate(ranks) if owner == rank]
            tasks = order(schedule, pp=pp, rank=rank, count=count, laps=laps)
            found = [(stages[task.lap], task.work.value, task.microbatch) for task in tasks]
            assert found == pytorch_order(kind, pp=pp, rank=rank, count=count, laps=laps)


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize("count", [16, 64])
def test_the_peak_is_that_of_the_whole_order(schedule: Schedule, count: int):
    """Few rounds tell what many hold; stages of a rank weigh differently."""
    laps = {Schedule.interleaved: 3, Schedule.zero_bubble: 2, Schedule.zbv: 2}.get(schedule, 1)
    sizes = [5.0, 3.0, 2.0][:laps]
    layout = replace(LAYOUT, schedule=schedule, num_virtual_stages=laps, global_batch_size=count)
    for rank in range(4):
        now = most = 0.0
        for task in order(schedule, pp=4, rank=rank, count=count, laps=laps):
            if task.work is not Pass.backward_input:
                now += sizes[task.lap] * (1 if task.work is Pass.forward else -1)
            most = max(most, now)
        assert now == 0
        assert peak_bytes(layout, rank=rank, per_lap=sizes) == most


def simulate_1f1b(pp: int, count: int) -> tuple[list[int], float]:
    """Most microbatches that each rank holds, and waiting per computing; a backward takes as long as two forwards."""
    done: dict[tuple[str, int, int], float] = {}
    held, ends = [0] * pp, [0.0] * pp
    orders = []
    for rank in range(pp):
        warm = min(count, pp - 1 - rank)
        order = [("f", i) for i in range(warm)]
        for index in range(count - warm):
            order += [("f", warm + index), ("b", index)]
        orders.append(order + [("b", i) for i in range(count - warm, count)])
    places = [0] * pp
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        for rank in range(pp):
            while places[rank] < len(orders[rank]):
                kind, index = orders[rank][places[rank]]
                other = rank - 1 if kind == "f" else rank + 1
                ready = 0.0 if not 0 <= other < pp else done.get((kind, other, index))
                if ready is None:
                    break
                ends[rank] = max(ends[rank], ready) + (1 if kind == "f" else 2)
                done[kind, rank, index] = ends[rank]
                places[rank] += 1
    for rank in range(pp):
        alive = most = 0
        for kind, _ in orders[rank]:
            alive += 1 if kind == "f" else -1
            most = max(most, alive)
        held[rank] = most
    return held, max(ends) / (3 * count) - 1


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("count", [8, 16])
def test_1f1b(pp: int, count: int):
    layout = replace(LAYOUT, pp=pp, global_batch_size=count)
    held, waiting = simulate_1f1b(pp, count)
    assert [in_flight(layout, rank=rank) for rank in range(pp)] == held
    assert bubble(layout) == pytest.approx(waiting)


def test_gpipe_holds_all_and_waits_as_long():
    layout = replace(LAYOUT, schedule=Schedule.gpipe)
    assert in_flight(layout, rank=0) == in_flight(layout, rank=3) == 16
    assert bubble(layout) == bubble(LAYOUT)


def test_stages_of_a_rank_trade_memory_for_waiting():
    layout = replace(LAYOUT, schedule=Schedule.interleaved, num_virtual_stages=2)
    assert bubble(layout) == bubble(LAYOUT) / 2
    assert in_flight(layout, rank=0) > in_flight(LAYOUT, rank=0)
    assert in_flight(layout, rank=0) == (2 * 3 + 4 + 1) / 2


def test_one_rank_neither_waits_nor_holds():
    assert bubble(replace(LAYOUT, pp=1)) == 0
    assert in_flight(replace(LAYOUT, pp=1), rank=0) == 1


def test_zero_bubble_waits_less():
    layout = replace(LAYOUT, schedule=Schedule.zero_bubble)
    assert 0 < bubble(layout) < bubble(LAYOUT)


def test_the_v_schedule_waits_less_and_holds_no_more_than_1f1b():
    layout = replace(LAYOUT, schedule=Schedule.zbv, num_virtual_stages=2)
    assert 0 < bubble(layout) < bubble(LAYOUT) / 2
    assert [in_flight(layout, rank=rank) for rank in range(4)] == [4.0] * 4
