"""Every block is owned once, and the dearest stage is as cheap as it can be."""

from itertools import combinations, pairwise

import pytest

from nvfp4_train.analysis.plan.stages import split_stages
from nvfp4_train.config.pattern import LayerPattern

COSTS = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]
PATTERN = LayerPattern.parse("M-M-M-M-")


def dearest(sizes: list[int], end_cost: float) -> float:
    bounds = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
    parts = [sum(COSTS[a:b]) for a, b in pairwise(bounds)]
    parts[-1] += end_cost
    return max(parts)


@pytest.mark.parametrize("num_stages", range(1, 9))
@pytest.mark.parametrize("end_cost", [0.0, 7.0])
def test_no_other_division_is_better(num_stages: int, end_cost: float):
    stages = split_stages(PATTERN, num_stages=num_stages, costs=COSTS, end_cost=end_cost)
    sizes = [len(stage.blocks) for stage in stages]
    every = [
        [b - a for a, b in zip((0, *cuts), (*cuts, len(COSTS)), strict=True)]
        for cuts in combinations(range(1, len(COSTS)), num_stages - 1)
    ]
    assert dearest(sizes, end_cost) == pytest.approx(min(dearest(other, end_cost) for other in every))


def test_every_block_is_owned_once_and_the_ends_are_at_the_ends():
    stages = split_stages(PATTERN, num_stages=3, costs=COSTS, end_cost=1.0)
    assert [index for stage in stages for index in stage.blocks] == list(range(8))
    assert [stage.is_first for stage in stages] == [True, False, False]
    assert [stage.is_last for stage in stages] == [False, False, True]


def test_the_pattern_decides_where_it_says_so():
    pattern = LayerPattern.parse("M|-M-M-|M-")
    stages = split_stages(pattern, num_stages=3, costs=COSTS, end_cost=0.0)
    assert [len(stage.blocks) for stage in stages] == [1, 5, 2]
