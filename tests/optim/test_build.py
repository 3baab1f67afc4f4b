import torch
from torch import nn

from nvfp4_train.optim.build import build_optimizer
from nvfp4_train.optim.update import apply_update
from tests.support.tiny import tiny_optimizer


def build_linear() -> nn.Linear:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.copy_(torch.linspace(-1, 1, 6).view(2, 3))
        model.bias.copy_(torch.tensor([0.5, -2.0]))
    return model


def test_one_step_is_adamw_by_hand():
    model = build_linear()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(model, tiny_optimizer(eps=1e-3))
    gradients = {"weight": torch.tensor([[0.1, -0.2, 0.3], [1.0, 2.0, -3.0]]), "bias": torch.tensor([0.0, 4.0])}
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name].clone()
    apply_update(optimizer, lr=0.01, weight_decay=0.5, skip=torch.zeros(()))
    for name, parameter in model.named_parameters():
        decay = 0.5 if name == "weight" else 0.0
        # In the first step the bias corrections make the moments g and g^2.
        update = gradients[name] / (gradients[name].abs() + 1e-3)
        expected = before[name] * (1 - 0.01 * decay) - 0.01 * update
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-6, atol=1e-7)


def test_state_exists_before_the_first_step_and_is_what_the_first_step_would_make():
    model = build_linear()
    optimizer = build_optimizer(model, tiny_optimizer())
    lazy = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    lazy.step()
    for parameter in model.parameters():
        ours, theirs = optimizer.state[parameter], lazy.state[parameter]
        assert {key: (value.shape, value.dtype) for key, value in ours.items()} == {
            key: (value.shape, value.dtype) for key, value in theirs.items()
        }
        assert all(not value.any() for value in ours.values())
