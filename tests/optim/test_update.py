import pytest
import torch
from torch import nn

from nvfp4_train.optim.build import build_optimizer
from nvfp4_train.optim.update import apply_update
from tests.support.tiny import tiny_optimizer


@pytest.fixture
def model() -> nn.Linear:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    return model


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    tensors = [parameter.detach().clone() for parameter in model.parameters()]
    return tensors + [
        value.clone() for parameter in model.parameters() for value in optimizer.state[parameter].values()
    ]


def set_gradients(model: nn.Module, value: float) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)


def test_learning_rate_is_that_of_the_call(model):
    optimizer = build_optimizer(model, tiny_optimizer(eps=1e-12))
    set_gradients(model, 5.0)
    apply_update(optimizer, lr=0.25, weight_decay=0.0, skip=torch.zeros(()))
    # Without eps the first update of AdamW would be the sign of the gradient.
    assert torch.allclose(model.weight, torch.full_like(model.weight, 0.75))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_skipped_update_changes_nothing_and_the_next_one_is_as_if_it_had_not_been(model):
    optimizer = build_optimizer(model, tiny_optimizer())
    set_gradients(model, 1.0)
    apply_update(optimizer, lr=0.1, weight_decay=0.1, skip=torch.zeros(()))
    before = snapshot(model, optimizer)
    set_gradients(model, float("nan"))
    apply_update(optimizer, lr=0.1, weight_decay=0.1, skip=torch.ones(()))
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(model, optimizer), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    set_gradients(model, 1.0)
    apply_update(optimizer, lr=0.1, weight_decay=0.1, skip=torch.zeros(()))
    assert optimizer.state[model.weight]["step"] == 2
    assert model.weight.isfinite().all()


def test_weight_decay_is_that_of_the_call_and_pulls_matrices_only(model):
    optimizer = build_optimizer(model, tiny_optimizer())
    set_gradients(model, 0.0)
    apply_update(optimizer, lr=0.5, weight_decay=0.2, skip=torch.zeros(()))
    assert torch.allclose(model.weight, torch.full_like(model.weight, 0.9))
    assert torch.equal(model.bias, torch.ones_like(model.bias))
