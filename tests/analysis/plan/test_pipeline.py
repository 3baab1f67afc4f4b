"""Microbatches in flight and waiting time against a simulation of the schedules."""

from dataclasses import replace

import pytest

from nvfp4_train.analysis.plan.layout import Layout, Schedule
from nvfp4_train.analysis.plan.pipeline import bubble, in_flight

LAYOUT = Layout(pp=4, micro_batch_size=1, global_batch_size=16, sequence_length=64)


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
