import pytest
import torch
import torch.distributed as dist
from torch import nn

from nvfp4_train.numerics.spec import GemmMode
from nvfp4_train.parallel.amax import AmaxAgreement, agree_on_amax
from nvfp4_train.parallel.runtime import Runtime
from nvfp4_train.precision.linear import LinearPrecision, QuantizedLinear
from nvfp4_train.precision.operands import OPERAND_PLACES
from nvfp4_train.precision.position import RoundingPosition
from tests.support.ranks import run_on_ranks
from tests.support.recipes import nvfp4_table

# Operands of which the ranks hold other columns, and other rows, by what is spread over them.
COLUMNS = {
    "inputs": {"fprop.x", "fprop.w"},
    "outputs": {"dgrad.dy", "dgrad.w"},
    "tokens": {"wgrad.x", "wgrad.dy"},
}
ROWS = {
    "inputs": {"dgrad.w", "wgrad.x"},
    "outputs": {"fprop.w", "wgrad.dy"},
    "tokens": {"fprop.x", "dgrad.dy"},
}


def agreed(runtime: Runtime) -> dict[tuple[str, str, str], list[float]]:
    whole = torch.tensor([1.0 + runtime.rank])
    rows = torch.tensor([1.0 + runtime.rank, 2.0 - runtime.rank])
    nan = torch.tensor([float("nan") if runtime.rank == 1 else float("inf")])
    found = {}
    for spread in COLUMNS:
        agreement = AmaxAgreement(lambda name, amax: amax, spread=spread, group=dist.group.WORLD)
        for name in OPERAND_PLACES:
            for kind, amax in (("whole", whole), ("rows", rows), ("nan", nan)):
                found[spread, name, kind] = agreement(name, amax).tolist()
    linear = QuantizedLinear.from_linear(
        nn.Linear(16, 16),
        precision=LinearPrecision(
            layer="x", recipe_name="nvfp4", recipe=nvfp4_table(), high_precision=nvfp4_table(), gemm=GemmMode.auto
        ),
        position=RoundingPosition(seed=0),
    )
    for spread in ("inputs", "tokens"):
        agree_on_amax(linear, spread=spread, group=dist.group.WORLD)
    for name in OPERAND_PLACES:
        found["both", name, "whole"] = linear.reduce_amax(name, whole).tolist()
    return found


@pytest.fixture(scope="module")
def ranks():
    return run_on_ranks(agreed, 2)


@pytest.mark.distributed
@pytest.mark.parametrize("spread", COLUMNS)
@pytest.mark.parametrize("name", OPERAND_PLACES)
def test_an_amax_is_that_of_all_ranks_with_a_part_of_what_it_scales(ranks, spread, name):
    for rank, found in enumerate(ranks):
        is_spread = name in COLUMNS[spread] | ROWS[spread]
        assert found[spread, name, "whole"] == [2.0 if is_spread else 1.0 + rank]
        own_rows = [1.0 + rank, 2.0 - rank]
        assert found[spread, name, "rows"] == ([2.0, 2.0] if name in COLUMNS[spread] else own_rows)


@pytest.mark.distributed
def test_a_nan_of_one_rank_is_everyone_s(ranks):
    for found in ranks:
        assert str(found["inputs", "fprop.x", "nan"]) == "[nan]"


@pytest.mark.distributed
def test_agreements_over_several_axes_add_up(ranks):
    for rank, found in enumerate(ranks):
        agreeing = {name for name in OPERAND_PLACES if found["both", name, "whole"] == [2.0]}
        if rank == 0:
            assert agreeing == {name for which in ("inputs", "tokens") for name in COLUMNS[which] | ROWS[which]}
