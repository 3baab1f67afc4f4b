"""Which blocks each stage of the pipeline holds."""

from dataclasses import dataclass

from nvfp4_train.config.pattern import LayerPattern


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A run of blocks.

    Args:
        index: Of the stage; its pipeline rank is ``index % pp``.
        blocks: Indices of its blocks in the main model.
        is_first: Whether it has the embedding.
        is_last: Whether it has the final norm, the head, the loss and multi-token prediction.
    """

    index: int
    blocks: range
    is_first: bool
    is_last: bool


def split_stages(pattern: LayerPattern, *, num_stages: int, costs: list[float], end_cost: float) -> list[Stage]:
    """Divide the blocks into stages: where the pattern has ``|``, else so that the dearest stage is as cheap as it can.

    Args:
        pattern: Of the model.
        num_stages: At most as many as blocks.
        costs: Of each block, in any unit.
        end_cost: Of what the last stage has besides blocks.
    """
    sizes = [len(segment) for segment in pattern.segments]
    if len(sizes) != num_stages or num_stages == 1:
        sizes = _balance(costs, end_cost, num_stages=num_stages)
    bounds = [sum(sizes[:index]) for index in range(num_stages + 1)]
    return [
        Stage(
            index=index,
            blocks=range(bounds[index], bounds[index + 1]),
            is_first=index == 0,
            is_last=index == num_stages - 1,
        )
        for index in range(num_stages)
    ]


def _balance(costs: list[float], end_cost: float, *, num_stages: int) -> list[int]:
    low, high = max(*costs, end_cost), 1.001 * (sum(costs) + end_cost)
    best = _cut(costs, end_cost, num_stages=num_stages, limit=high)
    assert best is not None
    for _ in range(40):  # halves the interval until the limit is exact to 12 digits
        limit = (low + high) / 2
        sizes = _cut(costs, end_cost, num_stages=num_stages, limit=limit)
        if sizes is None:
            low = limit
        else:
            best, high = sizes, limit
    return best


def _cut(costs: list[float], end_cost: float, *, num_stages: int, limit: float) -> list[int] | None:
    """Fill stages up to a limit, from the last one, which has the ends; None if the blocks do not fit."""
    sizes: list[int] = []
    rest = len(costs)
    total = end_cost
    for stages_left in range(num_stages - 1, -1, -1):
        size = 0
        while rest > stages_left and total + costs[rest - 1] <= limit:
            total += costs[rest - 1]
            rest, size = rest - 1, size + 1
        sizes.append(size)
        total = 0.0
    return sizes[::-1] if rest == 0 and all(sizes) else None
