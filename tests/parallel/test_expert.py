"""Two ranks with two of four experts each compute what one process with all four computes."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nvfp4_train.model.moe import Experts
from nvfp4_train.model.router import Routing
from nvfp4_train.parallel.expert import TokenExchange
from nvfp4_train.parallel.mesh import build_mesh
from nvfp4_train.parallel.runtime import Runtime
from tests.support.models import TINY_MOE
from tests.support.ranks import run_on_ranks
from tests.support.tiny import parallel_layout

NUM_RANKS, NUM_EXPERTS, WIDTH, TOP_K = 2, 4, 16, 2
MOE = replace(TINY_MOE, num_experts=NUM_EXPERTS, top_k=TOP_K)
# The two experts of each token, by rank; no one chooses expert 1, in "far" all go to the second rank, in "near" each
# rank keeps its own.
CHOICES = {
    "mixed": [[[0, 2], [3, 0], [2, 3]], [[2, 0], [3, 2]]],
    "far": [[[2, 3], [3, 2]], [[3, 2]]],
    "near": [[[0, 1]], [[2, 3], [3, 2]]],
}


def tokens_of(rank: int, case: str) -> Tensor:
    rng = torch.Generator().manual_seed(10 + rank)
    return torch.randn(len(CHOICES[case][rank]), WIDTH, generator=rng, dtype=torch.float64)


def routing_of(rank: int, case: str) -> Routing:
    experts = torch.tensor(CHOICES[case][rank])
    weights = torch.rand(experts.shape, generator=torch.Generator().manual_seed(20 + rank), dtype=torch.float64)
    return Routing(experts=experts, weights=weights.requires_grad_(), penalty=None)


def whole_experts() -> Experts:
    experts = Experts(MOE, width=WIDTH).double()
    rng = torch.Generator().manual_seed(1)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, generator=rng)
    return experts


def computed(experts: Experts, *, ranks: range, case: str) -> dict[str, Any]:
    """What these ranks' tokens become together, and the gradients of the sum of squares."""
    x = torch.cat([tokens_of(rank, case) for rank in ranks]).requires_grad_()
    routings = [routing_of(rank, case) for rank in ranks]
    routing = Routing(*(torch.cat([getattr(part, name) for part in routings]) for name in ("experts", "weights")), None)
    y = experts(x, routing)
    y.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in experts.named_parameters()}
    return {"y": y.detach(), "x": x.grad, "weights": [part.weights.grad for part in routings], "experts": gradients}


def run_rank(runtime: Runtime) -> dict[str, Any]:
    exchange = TokenExchange(build_mesh(parallel_layout(ep=NUM_RANKS), runtime).group("ep"))
    found: dict[str, Any] = {}
    own = slice(runtime.rank * 2, runtime.rank * 2 + 2)
    for case in CHOICES:
        experts = whole_experts()
        for grouped in (experts.up_proj, experts.down_proj):
            grouped.weight = nn.Parameter(grouped.weight.detach()[own].clone())
        experts.exchange = exchange
        found[case] = computed(experts, ranks=range(runtime.rank, runtime.rank + 1), case=case)
    # Rank 0 has 3 rows for its own expert 0 and 1 for expert 2, rank 1 has 1 row for expert 0 and 2 for expert 2.
    tokens = 10.0 * runtime.rank + torch.arange(4.0 - runtime.rank)[:, None]
    ends = torch.tensor([[3, 3, 4, 4], [1, 1, 3, 3]], dtype=torch.int32)[runtime.rank]
    arrived = exchange(tokens, ends)
    found["arrived"] = arrived.tokens.flatten().tolist(), arrived.ends.tolist(), str(arrived.ends.dtype)
    found["returned"] = torch.equal(arrived.send_back(arrived.tokens), tokens)
    return found


@cache
def ranks() -> list[dict[str, Any]]:
    return run_on_ranks(run_rank, NUM_RANKS)


@pytest.mark.distributed
def test_tokens_arrive_by_expert_and_then_by_rank():
    assert ranks()[0]["arrived"] == ([0.0, 1.0, 2.0, 10.0], [4, 4], "torch.int32")
    assert ranks()[1]["arrived"] == ([3.0, 11.0, 12.0], [3, 3], "torch.int32")
    assert all(rank["returned"] for rank in ranks())


@pytest.mark.distributed
@pytest.mark.parametrize("case", CHOICES)
def test_results_and_gradients_are_those_of_one_process(case):
    expected = computed(whole_experts(), ranks=range(NUM_RANKS), case=case)
    found = [rank[case] for rank in ranks()]
    close: dict[str, float] = {"rtol": 1e-12, "atol": 1e-12}
    for key in ("y", "x"):
        torch.testing.assert_close(torch.cat([rank[key] for rank in found]), expected[key], **close)
    for rank, gradient in enumerate(expected["weights"]):
        torch.testing.assert_close(found[rank]["weights"][0], gradient, **close)
    for name, gradient in expected["experts"].items():
        torch.testing.assert_close(torch.cat([rank["experts"][name] for rank in found]), gradient, **close)
