"""AdamW against PyTorch's own, with moments kept in every way."""

import pytest
import torch
from torch import Tensor, nn

from nvfp4_train.config.optimizer import StateDtype, StateOffload
from nvfp4_train.optim import adamw
from nvfp4_train.optim.adamw import AdamW, StateStorage
from nvfp4_train.optim.build import build_optimizer
from nvfp4_train.optim.sharding import Sharding
from nvfp4_train.optim.update import apply_update
from tests.support.tiny import tiny_optimizer


def build_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4, bias=False))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int = 5, skipped: int = -1) -> None:
    rng = torch.Generator().manual_seed(1)
    for step in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=rng)
        apply_update(optimizer, lr=0.01, weight_decay=0.1, skip=torch.tensor(float(step == skipped)))


def parameters_after(**options: object) -> list[Tensor]:
    model = build_layers()
    train(model, build_optimizer(model, tiny_optimizer(**options)))
    return [parameter.detach() for parameter in model.parameters()]


def test_it_is_the_fused_adamw_of_pytorch_bit_for_bit():
    model = build_layers()
    decays = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": decays, "decays": True}, {"params": others, "decays": False}]
    train(model, torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8, fused=True))
    for ours, theirs in zip(parameters_after(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_bf16_moments_are_rounded_after_every_step_and_used_in_fp32():
    model, reference = build_layers(), build_layers()
    train(model, build_optimizer(model, tiny_optimizer(state_dtype=StateDtype.bf16)))
    optimizer = build_optimizer(reference, tiny_optimizer())
    rng = torch.Generator().manual_seed(1)
    for _ in range(5):
        for parameter in reference.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=rng)
        apply_update(optimizer, lr=0.01, weight_decay=0.1, skip=torch.zeros(()))
        for state in optimizer.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                state[key].copy_(state[key].to(torch.bfloat16))
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_bf16_moments_take_half_the_bytes():
    model = build_layers()
    optimizer = build_optimizer(model, tiny_optimizer(state_dtype=StateDtype.bf16))
    for parameter, state in optimizer.state.items():
        assert state["exp_avg"].dtype is state["exp_avg_sq"].dtype is torch.bfloat16
        assert state["exp_avg"].shape == parameter.shape


def test_where_moments_live_changes_no_bit():
    for ours, theirs in zip(parameters_after(state_offload=StateOffload.cpu), parameters_after(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", list(StateDtype))
def test_buckets_change_no_bit(dtype, monkeypatch):
    expected = parameters_after(state_dtype=dtype)
    monkeypatch.setattr(adamw, "BUCKET_ELEMENTS", 20)  # less than a weight and a bias together
    monkeypatch.setattr(StateStorage, "matches", lambda self, parameter: False)
    for ours, theirs in zip(parameters_after(state_dtype=dtype), expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", list(StateDtype))
def test_a_skipped_step_leaves_everything(dtype):
    model = build_layers()
    optimizer = build_optimizer(model, tiny_optimizer(state_dtype=dtype))
    train(model, optimizer, steps=1)
    before = [value.clone() for state in optimizer.state.values() for value in state.values()]
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    train(model, optimizer, steps=1, skipped=0)
    after = [value for state in optimizer.state.values() for value in state.values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))


def test_parameters_without_a_gradient_stay():
    model = build_layers()
    groups = [{"params": list(model.parameters()), "decays": False}]
    optimizer = AdamW(groups, betas=(0.9, 0.95), eps=1e-8, storage=StateStorage(), sharding=Sharding())
    before = model[1].weight.detach().clone()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    apply_update(optimizer, lr=0.1, weight_decay=0.0, skip=torch.zeros(()))
    assert torch.equal(model[1].weight, before)
    assert optimizer.state[model[1].weight]["step"] == 0
