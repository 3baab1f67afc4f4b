"""Three ranks that hold a third of every row compute what one process computes with whole rows."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nvfp4_train.config.model import ModelConfig, Position
from nvfp4_train.data.batch import IGNORE_INDEX, Batch
from nvfp4_train.model.hybrid import HybridLM
from nvfp4_train.model.row_part import RowPart
from nvfp4_train.parallel.compile import compile_blocks
from nvfp4_train.parallel.context import apply_context, build_row_exchange, cut_rows, stream_rows
from nvfp4_train.parallel.mesh import Mesh, build_mesh
from nvfp4_train.parallel.runtime import Runtime
from tests.support.models import document_ids, initialized, tiny_model
from tests.support.ranks import run_on_ranks
from tests.support.tiny import parallel_layout

NUM_RANKS, SIZE = 3, 48
PART = SIZE // NUM_RANKS
# Documents that begin and end in a part, that span two and three parts, and that begin where a part does.
IDS = torch.cat((document_ids(5, 30, 13), document_ids(48), document_ids(16, 20, 12), document_ids(14, 1, 33)))
PERTURBED = 1  # a document of every row but the second, where it is the only one


def model_cfg() -> ModelConfig:
    """Every kind of block and of loss; chunks of the scan that do not divide a part."""
    cfg = tiny_model(pattern="M*E-M/*E/*E", vocab_size=32, d_model=32)
    attention = replace(cfg.attention, position=Position.rope, window_tokens=9)
    moe = replace(cfg.moe, auxiliary_loss_weight=0.1, z_loss_weight=0.01)
    return replace(cfg, attention=attention, moe=moe, mamba=replace(cfg.mamba, chunk_size=6))


def data() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(32, IDS.shape, generator=torch.Generator().manual_seed(3))
    labels = tokens.roll(-1, dims=1)
    labels[:, -1] = IGNORE_INDEX
    labels[0, : 2 * PART] = IGNORE_INDEX  # padding: parts of a row, and one part of all rows, count nothing
    labels[:, PART : 2 * PART] = IGNORE_INDEX
    return tokens, labels


def double_model(*, is_windowed: bool, pattern: str | None = None) -> HybridLM:
    cfg = model_cfg()
    if not is_windowed:
        cfg = replace(cfg, attention=replace(cfg.attention, window_tokens=0))
    if pattern is not None:
        cfg = replace(cfg, pattern=pattern)
    model = initialized(cfg, seed=2).double()
    model.compute_dtype = torch.float64
    return model


@dataclass
class Trained:
    loss: Tensor
    extra_losses: dict[str, Tensor]
    gradients: dict[str, Tensor]
    counts: dict[str, Tensor]


def trained(model: HybridLM, tokens: Tensor, labels: Tensor) -> Trained:
    loss = model(tokens, document_ids=IDS, labels=labels)
    loss.backward()
    return Trained(
        loss=loss.detach(),
        extra_losses=dict(model.extra_losses),
        gradients={name: parameter.grad for name, parameter in model.named_parameters()},
        counts={name: buffer.clone() for name, buffer in model.named_buffers() if name.endswith("tokens_per_expert")},
    )


def logits_of(model: HybridLM, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model(tokens, document_ids=IDS)


def perturbed(tokens: Tensor) -> Tensor:
    return torch.where(IDS == PERTURBED, (tokens + 7) % 32, tokens)


def run_rank(runtime: Runtime) -> dict[str, Any]:
    mesh = build_mesh(parallel_layout(cp=NUM_RANKS), runtime)
    tokens, labels = data()
    found: dict[str, Any] = {}
    for name in ("windowed", "unlimited"):
        model = double_model(is_windowed=name == "windowed")
        apply_context(model, mesh=mesh)
        local = cut_rows(tokens, mesh=mesh)
        found[name] = trained(model, local, cut_rows(labels, mesh=mesh))
        # Without experts: how many tokens share a GEMM rounds its sums in another order.
        model = double_model(is_windowed=name == "windowed", pattern="M*-M")
        apply_context(model, mesh=mesh)
        found[f"{name} logits"] = logits_of(model, local)
        found[f"{name} perturbed"] = logits_of(model, cut_rows(perturbed(tokens), mesh=mesh))
        with patch.object(RowPart, "is_near", lambda *_: False):
            found[f"{name} gathered"] = gathered(mesh, tokens, labels, is_windowed=name == "windowed")
        if name == "windowed":
            compile_blocks(model, backend="eager")
            found["compiled"] = logits_of(model, local)
    batch = Batch(tokens=tokens, labels=labels, document_ids=IDS, position_ids=IDS, microbatch_index=2)
    found["stream"] = stream_rows(batch, mesh=mesh)
    found["exchange"] = exchanged(mesh.group("cp"), runtime.rank)
    found["near"] = {count: near_and_whole(mesh.group("cp"), runtime.rank, count=count) for count in (0, 1, 5, PART)}
    return found


def gathered(mesh: Mesh, tokens: Tensor, labels: Tensor, *, is_windowed: bool) -> Trained:
    model = double_model(is_windowed=is_windowed)
    apply_context(model, mesh=mesh)
    return trained(model, cut_rows(tokens, mesh=mesh), cut_rows(labels, mesh=mesh))


def near_and_whole(group: Any, rank: int, *, count: int) -> list[tuple[Tensor, Tensor]]:
    """BF16 values that come from the neighbour, or out of whole rows, and their gradients."""
    exchange = build_row_exchange(group, rank=rank, degree=NUM_RANKS)
    rng = torch.Generator().manual_seed(rank)
    x = torch.randn(2, PART, 3, generator=rng).bfloat16()
    weight = torch.randn(2, count + PART, 3, generator=rng).bfloat16()
    near, far = x.clone().requires_grad_(), x.clone().requires_grad_()
    found = exchange.with_preceding(near, 1, count)
    whole = F.pad(exchange.gather(far, 1), (0, 0, PART, 0))
    expected = whole[:, (rank + 1) * PART - count : (rank + 2) * PART]
    for y in (found, expected):
        y.backward(weight)
    return [(found.detach(), expected.detach()), (near.grad, far.grad)]


def exchanged(group: Any, rank: int) -> dict[str, Any]:
    """Each rank holds the tokens 2 * rank and 2 * rank + 1 of one row."""
    exchange = build_row_exchange(group, rank=rank, degree=NUM_RANKS)
    x = torch.tensor([[2.0 * rank, 2.0 * rank + 1]]).requires_grad_()
    before, after = exchange.preceding(x, 3), exchange.following(x, 3)
    (before * torch.tensor([1.0, 10.0, 100.0])).sum().backward()
    value, factor = torch.tensor([1.0 + rank]), torch.tensor([10.0])
    return {
        "before": before.detach().tolist(),
        "after": after.detach().tolist(),
        "gradient": x.grad.tolist(),
        "whole": exchange.gather(x.detach(), 1).tolist(),
        "forward": exchange.carry_forward(value, factor).item(),
        "backward": exchange.carry_backward(value, factor).item(),
        "sum": exchange.sum(value).item(),
    }


@cache
def ranks() -> list[dict[str, Any]]:
    return run_on_ranks(run_rank, NUM_RANKS)


@pytest.fixture(params=["windowed", "unlimited"])
def name(request) -> str:
    return request.param


@pytest.fixture
def one(name) -> Trained:
    return trained(double_model(is_windowed=name == "windowed"), *data())


def assert_exact(found: Tensor, expected: Tensor) -> None:
    """To 1e-12 of the tensor's own size."""
    assert (found - expected).abs().max() <= 1e-12 * expected.abs().max().clamp(min=1e-3)


@pytest.mark.distributed
def test_losses_are_those_of_whole_rows(name, one):
    assert_exact(torch.stack([found[name].loss for found in ranks()]).sum(), one.loss)
    assert set(one.extra_losses) == {"router", "mtp_1", "mtp_2"}
    for key, value in one.extra_losses.items():
        assert_exact(torch.stack([found[name].extra_losses[key] for found in ranks()]).sum(0), value)


@pytest.mark.distributed
def test_gradients_are_those_of_whole_rows(name, one):
    for key, gradient in one.gradients.items():
        assert_exact(torch.stack([found[name].gradients[key] for found in ranks()]).sum(0), gradient)


@pytest.mark.distributed
def test_every_choice_of_an_expert_is_counted_once(name, one):
    for key, counts in one.counts.items():
        assert torch.equal(torch.stack([found[name].counts[key] for found in ranks()]).sum(0), counts)


@pytest.mark.distributed
def test_logits_are_those_of_whole_rows(name):
    expected = logits_of(double_model(is_windowed=name == "windowed", pattern="M*-M"), data()[0])
    assert_exact(torch.cat([found[f"{name} logits"] for found in ranks()], dim=1), expected)


@pytest.mark.distributed
def test_capturing_changes_no_bit():
    for found in ranks():
        assert torch.equal(found["compiled"], found["windowed logits"])


@pytest.mark.distributed
def test_other_documents_do_not_notice_a_change_in_one(name):
    before, after = (torch.cat([found[f"{name} {key}"] for found in ranks()], dim=1) for key in ("logits", "perturbed"))
    others = IDS != PERTURBED
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before[~others], after[~others])


@pytest.mark.distributed
def test_ranks_know_where_their_tokens_are_in_the_global_batch():
    first = 2 * IDS.numel()
    assert [found["stream"] for found in ranks()] == [
        {"row_offset": first + rank * PART, "segment": PART, "stride": SIZE} for rank in range(NUM_RANKS)
    ]


@pytest.mark.distributed
def test_what_ranks_exchange():
    found = [rank["exchange"] for rank in ranks()]
    assert [rank["before"] for rank in found] == [[[0.0, 0.0, 0.0]], [[0.0, 0.0, 1.0]], [[1.0, 2.0, 3.0]]]
    assert [rank["after"] for rank in found] == [[[2.0, 3.0, 4.0]], [[4.0, 5.0, 0.0]], [[0.0, 0.0, 0.0]]]
    assert [rank["gradient"] for rank in found] == [[[10.0, 101.0]], [[10.0, 100.0]], [[0.0, 0.0]]]
    assert all(rank["whole"] == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]] for rank in found)
    assert [rank["forward"] for rank in found] == [0.0, 1.0, 12.0]
    assert [rank["backward"] for rank in found] == [32.0, 3.0, 0.0]
    assert [rank["sum"] for rank in found] == [6.0] * 3


@pytest.mark.distributed
@pytest.mark.parametrize("count", [0, 1, 5, PART])
def test_what_the_neighbour_sends_and_gets_back_has_the_bits_of_whole_rows(count):
    for found in ranks():
        for near, whole in found["near"][count]:
            assert torch.equal(near, whole)


@pytest.mark.distributed
def test_a_window_that_reaches_the_neighbour_only_trains_bit_for_bit_as_one_over_whole_rows(name):
    for found in ranks():
        near, whole = found[name], found[f"{name} gathered"]
        assert torch.equal(near.loss, whole.loss)
        for key, gradient in near.gradients.items():
            assert torch.equal(gradient, whole.gradients[key]), key
