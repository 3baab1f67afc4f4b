import math

import pytest
import torch
from torch import nn

from nvfp4_train.train import anomaly
from nvfp4_train.train.anomaly import describe_cause
from tests.support.fake_engine import FakeEngine, fake_batch


class Explode(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 0.0


def model(**layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    sequence = nn.Sequential()
    sequence.add_module("embedding", nn.Embedding(16, 8))
    for name, layer in layers.items():
        sequence.add_module(name, layer)
    return sequence


def test_a_nan_in_a_weight_is_named():
    broken = model(first=nn.Linear(8, 8), second=nn.Linear(8, 8))
    with torch.no_grad():
        broken.second.weight[3, 4] = math.nan  # type: ignore[operator, union-attr]
    cause = describe_cause(FakeEngine(model=broken), [fake_batch(1)])
    assert cause == "first in the forward pass: second, operand weight"


def test_a_layer_that_makes_an_infinity_is_named_and_not_the_next_one():
    broken = model(first=nn.Linear(8, 8), boom=Explode(), last=nn.Linear(8, 8))
    assert describe_cause(FakeEngine(model=broken), [fake_batch(1)]) == "first in the forward pass: boom, result y"


def test_a_row_of_the_embedding_is_found_in_the_batch_that_reads_it():
    broken = model(first=nn.Linear(8, 8))
    with torch.no_grad():
        broken.embedding.weight[5] = math.inf  # type: ignore[operator, union-attr]
    cause = describe_cause(FakeEngine(model=broken), [fake_batch(1), fake_batch(5)])
    assert cause == "first in the forward pass: embedding, operand weight"


def test_a_finite_forward_leaves_what_the_backward_recorded(monkeypatch: pytest.MonkeyPatch):
    amax = {"first: dgrad.dy": torch.tensor([1.0]), "first: wgrad.dy": torch.tensor([math.nan])}
    monkeypatch.setattr(anomaly, "recorded_amax", lambda model: amax)
    cause = describe_cause(FakeEngine(model=model(first=nn.Linear(8, 8))), [fake_batch(1)])
    assert cause == "first in the backward pass: first: wgrad.dy"


def test_without_any_trace_the_gradients_are_blamed():
    cause = describe_cause(FakeEngine(model=model(first=nn.Linear(8, 8))), [fake_batch(1)])
    assert "gradients overflow" in cause


def test_the_watch_leaves_no_hooks():
    watched = model(first=nn.Linear(8, 8))
    describe_cause(FakeEngine(model=watched), [fake_batch(1)])
    hooks = [module._forward_hooks or module._forward_pre_hooks for module in watched.modules()]
    assert not any(hooks)


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ("embedding, result y", "first in the forward pass: embedding, result y"),
        ("blocks.10.norm, result y", "first in the forward pass: blocks.2.norm, operand x"),
        (None, "first in the forward pass: blocks.2.norm, operand x"),
    ],
)
def test_the_first_layer_of_all_ranks_is_named(monkeypatch: pytest.MonkeyPatch, others, expected):
    monkeypatch.setattr(
        anomaly, "gather_from_ranks", lambda own: [others, "blocks.2.norm, operand x" if own is None else own]
    )
    assert describe_cause(FakeEngine(model=model(first=nn.Linear(8, 8))), [fake_batch(1)]) == expected


def test_a_backward_begins_at_the_end_of_the_model(monkeypatch: pytest.MonkeyPatch):
    found = iter([[None, None, None], ["blocks.2.mixer: dgrad.dy", None, "lm_head: dgrad.dy"]])
    monkeypatch.setattr(anomaly, "gather_from_ranks", lambda own: next(found))
    cause = describe_cause(FakeEngine(model=model(first=nn.Linear(8, 8))), [fake_batch(1)])
    assert cause == "first in the backward pass: lm_head: dgrad.dy"
