"""Every collective against what it stands for, and its gradient against the adjoint."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nvfp4_train.parallel.collectives import (
    all_reduce,
    all_to_all,
    copy_to_ranks,
    gather,
    gather_equal,
    mean_over_ranks,
    reduce_scatter,
    split_equal,
)
from nvfp4_train.parallel.runtime import Runtime
from tests.support.ranks import run_on_ranks

NUM_RANKS = 2
SENT = [[1, 3], [2, 2]]  # rows from each rank to each
RECEIVED = [[1, 2], [3, 2]]


def values(rank: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float32)


def with_gradient(call, x: Tensor, *, rank: int) -> tuple[Tensor, Tensor]:
    x.requires_grad_()
    y = call(x)
    y.backward(values(10 + rank, *y.shape).to(y.dtype))
    return y.detach(), x.grad


def call_all(runtime: Runtime) -> dict[str, tuple[Tensor, Tensor]]:
    group, rank = dist.group.WORLD, runtime.rank
    sums = {"group": group, "sum_dtype": torch.float32}
    calls = {
        "gather": lambda x: gather(x, dim=1, **sums),
        "gather_last": lambda x: gather(x, dim=-1, **sums),
        "reduce_scatter": lambda x: reduce_scatter(x, dim=1, **sums),
        "all_reduce": lambda x: all_reduce(x, **sums),
        "copy_to_ranks": lambda x: copy_to_ranks(x, **sums),
        "gather_equal": lambda x: gather_equal(x, dim=1, group=group),
        "split_equal": lambda x: split_equal(x, dim=1, group=group),
        "all_to_all": lambda x: all_to_all(x, sent=SENT[rank], received=RECEIVED[rank], group=group),
    }
    found = {name: with_gradient(call, values(rank, 4, 4, 2), rank=rank) for name, call in calls.items()}
    x = values(rank, 4, 4).bfloat16()
    found["in_bf16"] = with_gradient(
        lambda x: all_reduce(x, group=group, sum_dtype=torch.bfloat16), x.clone(), rank=rank
    )
    found["mean"] = (mean_over_ranks(values(rank, 4, 4), group=group), torch.empty(0))
    x = torch.tensor([1.0 + 2.0**-10])
    found["rounds"] = with_gradient(lambda x: all_reduce(x, group=group, sum_dtype=torch.bfloat16), x, rank=rank)
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, tuple[Tensor, Tensor]]]:
    return run_on_ranks(call_all, NUM_RANKS)


def part(x: Tensor, rank: int, dim: int) -> Tensor:
    return x.chunk(NUM_RANKS, dim)[rank]


@pytest.mark.distributed
@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_results_are_those_of_the_parts_put_together(ranks, rank):
    x = [values(rank, 4, 4, 2) for rank in range(NUM_RANKS)]
    found = {name: result for name, (result, _) in ranks[rank].items()}
    assert torch.equal(found["gather"], torch.cat(x, dim=1))
    assert torch.equal(found["gather_last"], torch.cat(x, dim=2))
    assert torch.equal(found["reduce_scatter"], part(x[0] + x[1], rank, 1))
    assert torch.equal(found["all_reduce"], x[0] + x[1])
    assert torch.equal(found["copy_to_ranks"], x[rank])
    assert torch.equal(found["gather_equal"], torch.cat(x, dim=1))
    assert torch.equal(found["split_equal"], part(x[rank], rank, 1))
    rows = [source.split(SENT[index])[rank] for index, source in enumerate(x)]
    assert torch.equal(found["all_to_all"], torch.cat(rows))


@pytest.mark.distributed
@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_gradients_are_the_adjoint(ranks, rank):
    found = {name: gradient for name, (_, gradient) in ranks[rank].items()}

    def dy(*shape: int) -> list[Tensor]:
        return [values(10 + rank, *shape) for rank in range(NUM_RANKS)]

    assert torch.equal(found["gather"], part(sum(dy(4, 8, 2)), rank, 1))
    assert torch.equal(found["gather_last"], part(sum(dy(4, 4, 4)), rank, 2))
    assert torch.equal(found["reduce_scatter"], torch.cat(dy(4, 2, 2), dim=1))
    assert torch.equal(found["all_reduce"], dy(4, 4, 2)[rank])
    assert torch.equal(found["copy_to_ranks"], sum(dy(4, 4, 2)))
    assert torch.equal(found["gather_equal"], part(dy(4, 8, 2)[rank], rank, 1))
    assert torch.equal(found["split_equal"], torch.cat(dy(4, 2, 2), dim=1))
    sizes = [sum(received) for received in RECEIVED]
    gradients = [values(10 + index, sizes[index], 4, 2).split(RECEIVED[index])[rank] for index in range(NUM_RANKS)]
    assert torch.equal(found["all_to_all"], torch.cat(gradients))


@pytest.mark.distributed
def test_sums_are_taken_in_the_dtype_that_is_asked_for(ranks):
    (in_bf16, _), (rounded, gradient) = ranks[0]["in_bf16"], ranks[0]["rounds"]
    x = [values(rank, 4, 4).bfloat16() for rank in range(NUM_RANKS)]
    assert torch.equal(in_bf16, x[0] + x[1])
    assert rounded.dtype is torch.float32
    assert rounded.item() == 2.0
    assert gradient.dtype is torch.float32


def test_a_mean_over_ranks(ranks):
    wanted = torch.stack([values(rank, 4, 4) for rank in range(NUM_RANKS)]).mean(dim=0)
    for found in ranks:
        torch.testing.assert_close(found["mean"][0], wanted)
