import math

import pytest
import torch
from torch import nn

from nvfp4_train.config.optimizer import MuonConfig, StateDtype, StateOffload, UpdateScale
from nvfp4_train.optim.build import build_optimizer
from nvfp4_train.optim.fused_rows import FusedRows
from nvfp4_train.optim.muon import MuonRule
from nvfp4_train.optim.newton_schulz import orthogonalize
from nvfp4_train.optim.update import apply_update
from tests.support.models import initialized, tiny_model
from tests.support.tiny import tiny_muon, tiny_optimizer


def rule(scale: UpdateScale = UpdateScale.adamw_rms) -> MuonRule:
    return MuonRule(momentum=0.95, steps=5, dtype=torch.float32, scale=scale)


def gradients(model: nn.Module, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=rng)


def step(model: nn.Module, cfg: MuonConfig, *, skip: float = 0.0) -> torch.optim.Optimizer:
    optimizer = build_optimizer(model, cfg)
    gradients(model, 1)
    apply_update(optimizer, lr=0.01, weight_decay=0.1, skip=torch.tensor(skip))
    return optimizer


def test_one_step_of_a_matrix_by_hand():
    model = initialized(tiny_model(pattern="-"))
    name = "blocks.0.mixer.up_proj.weight"
    before = model.get_parameter(name).detach().clone()
    gradients(model, 1)
    momentum = 0.05 * model.get_parameter(name).grad  # lerp from zero
    direction = 0.05 * model.get_parameter(name).grad + 0.95 * momentum
    step(model, tiny_muon())
    update = orthogonalize(direction, steps=5, dtype=torch.float32) * 0.2 * math.sqrt(max(before.shape))
    expected = before * (1 - 0.01 * 0.1) - 0.01 * update
    torch.testing.assert_close(model.get_parameter(name).detach(), expected, rtol=1e-5, atol=1e-6)


def test_everything_but_matrices_is_updated_as_adamw_does():
    muon, adamw = (initialized(tiny_model(pattern="M*-E")) for _ in range(2))
    optimizer = step(muon, tiny_muon())
    gradients(adamw, 1)
    apply_update(build_optimizer(adamw, tiny_optimizer()), lr=0.01, weight_decay=0.1, skip=torch.zeros(()))
    names = {name for name, value in muon.named_parameters() if "momentum" not in optimizer.state[value]}
    others = ("embedding.weight", "lm_head.weight", "blocks.0.mixer.conv1d.weight", "blocks.0.mixer.scan.A_log")
    assert names.issuperset(others)
    assert not names.intersection(("blocks.3.mixer.experts.up_proj.weight", "blocks.3.mixer.router.weight"))
    for name, value in muon.named_parameters():
        assert torch.equal(value, adamw.get_parameter(name)) == (name in names), name


def test_fused_parts_are_orthogonal_each_for_itself():
    matrix = torch.randn(24, 16, generator=torch.Generator().manual_seed(0))
    rows = FusedRows((2, 4))
    found = rows.split(rule().update_of(matrix, rows=rows))
    for part, original in zip(found, rows.split(matrix), strict=True):
        assert torch.equal(part, rule().update_of(original, rows=None))


def test_experts_are_matrices_of_their_own():
    matrices = torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(0))
    together = rule().update_of(matrices, rows=None)
    for matrix, found in zip(matrices, together, strict=True):
        torch.testing.assert_close(found, rule().update_of(matrix, rows=None), rtol=1e-4, atol=1e-5)


def test_scales():
    matrix = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    plain = orthogonalize(matrix, steps=5, dtype=torch.float32)
    assert torch.equal(rule(UpdateScale.spectral).update_of(matrix, rows=None), plain * 2)
    assert torch.equal(rule(UpdateScale.spectral).update_of(matrix.mT, rows=None), plain.mT)
    adamw_like = rule(UpdateScale.adamw_rms).update_of(matrix, rows=None)
    assert adamw_like.square().mean().sqrt() == pytest.approx(0.2, rel=0.3)


@pytest.mark.parametrize("dtype", list(StateDtype))
def test_a_skipped_step_leaves_everything(dtype):
    model = initialized(tiny_model(pattern="M*"))
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizer = step(model, tiny_muon(state_dtype=dtype), skip=1.0)
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name]), name
    assert all(not value.any() for state in optimizer.state.values() for value in state.values())


def test_storage_of_the_momentum():
    model = initialized(tiny_model(pattern="-"))
    optimizer = step(model, tiny_muon(state_dtype=StateDtype.bf16, state_offload=StateOffload.cpu))
    weight = model.get_parameter("blocks.0.mixer.up_proj.weight")
    assert optimizer.state[weight].keys() == {"momentum"}
    assert optimizer.state[weight]["momentum"].dtype is torch.bfloat16
    assert optimizer.state[weight]["momentum"].any()
