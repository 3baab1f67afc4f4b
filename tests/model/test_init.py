import math
from dataclasses import replace

import pytest
import torch

from nvfp4_train.model.hybrid import build_model
from nvfp4_train.model.init import init_parameters, initial_value
from tests.support.models import TINY_MAMBA, TINY_MODEL, initialized, tiny_model


def draw(name, *shape, cfg=TINY_MODEL, seed=0):
    return initial_value(name, shape=torch.Size(shape), cfg=cfg, seed=seed)


def test_every_parameter_is_written_once_in_fp32():
    with torch.device("meta"):
        model = build_model(TINY_MODEL)
    written = {}
    init_parameters(model, TINY_MODEL, seed=0, write=written.setdefault)
    assert list(written) == list(model.parameters())
    assert all(value.shape == p.shape and value.dtype == torch.float32 for p, value in written.items())


def test_depends_on_name_and_seed_only():
    short, long = (
        initialized(tiny_model(pattern="M-")),
        initialized(tiny_model(pattern="M-M", rescale_prenorm_residual=True)),
    )
    assert torch.equal(short.blocks[0].mixer.in_proj.weight, long.blocks[0].mixer.in_proj.weight)
    assert not torch.equal(long.blocks[0].mixer.in_proj.weight, long.blocks[2].mixer.in_proj.weight)
    other = initialized(tiny_model(pattern="M-"), seed=1)
    assert not torch.equal(short.blocks[0].mixer.in_proj.weight, other.blocks[0].mixer.in_proj.weight)


def test_global_random_state_is_untouched():
    model = build_model(TINY_MODEL)
    before = torch.get_rng_state()
    init_parameters(model, TINY_MODEL, seed=0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "name", ["embedding", "lm_head", "blocks.0.mixer.in_proj", "blocks.2.mixer.qkv_proj", "blocks.1.mixer.up_proj"]
)
def test_matrices_are_normal(name):
    value = draw(f"{name}.weight", 300, 400)
    assert value.std().item() == pytest.approx(0.02, rel=0.02)
    assert abs(value.mean().item()) < 3e-4
    assert (value.abs() > 0.04).float().mean().item() == pytest.approx(0.0455, rel=0.1)


@pytest.mark.parametrize("name", ["out_proj", "o_proj", "down_proj"])
def test_writers_to_the_residual_stream_shrink_with_depth(name):
    value = draw(f"blocks.0.mixer.{name}.weight", 300, 400)
    assert value.std().item() == pytest.approx(0.02 / math.sqrt(5), rel=0.02)
    plain = draw(f"blocks.0.mixer.{name}.weight", 300, 400, cfg=tiny_model(rescale_prenorm_residual=False))
    torch.testing.assert_close(value * math.sqrt(5), plain)


def test_scan():
    rates = draw("blocks.0.mixer.scan.A_log", 4000).exp()
    assert rates.min() >= 1
    assert rates.max() <= 16
    assert rates.mean().item() == pytest.approx(8.5, rel=0.03)
    steps = torch.nn.functional.softplus(draw("blocks.0.mixer.scan.dt_bias", 4000).double())
    assert steps.min() >= 0.999e-3
    assert steps.max() <= 0.1001
    assert steps.log().mean().item() == pytest.approx((math.log(1e-3) + math.log(0.1)) / 2, rel=0.03)
    assert torch.equal(draw("blocks.0.mixer.scan.D", 4), torch.ones(4))


def test_dt_floor():
    cfg = tiny_model(mamba=replace(TINY_MAMBA, dt_init_min=1e-2, dt_init_max=1e-2, dt_init_floor=1e-2))
    steps = torch.nn.functional.softplus(draw("blocks.0.mixer.scan.dt_bias", 10, cfg=cfg))
    torch.testing.assert_close(steps, torch.full((10,), 1e-2))


def test_convolution_is_uniform_over_half():
    value = draw("blocks.0.mixer.conv1d.weight", 1000, 4)  # 1 / sqrt(4 taps)
    assert value.abs().max() <= 0.5
    assert value.std().item() == pytest.approx(1 / math.sqrt(12), rel=0.03)
    assert draw("blocks.0.mixer.conv1d.bias", 1000).std().item() == pytest.approx(1 / math.sqrt(12), rel=0.05)


def test_unknown_parameter():
    with pytest.raises(ValueError, match=r"blocks\.0\.mixer\.rotor"):
        draw("blocks.0.mixer.rotor", 3)


@pytest.mark.parametrize("name", ["blocks.0.mixer.router", "blocks.0.mixer.fc1_latent_proj", "mtp.0.eh_proj"])
def test_other_matrices_are_normal(name):
    assert draw(f"{name}.weight", 300, 400).std().item() == pytest.approx(0.02, rel=0.02)


def test_experts_that_write_to_the_residual_stream_shrink_with_depth():
    for name in ("experts.down_proj", "fc2_latent_proj", "shared_experts.down_proj"):
        value = draw(f"blocks.0.mixer.{name}.weight", 300, 400)
        assert value.std().item() == pytest.approx(0.02 / math.sqrt(5), rel=0.02)


def test_everything_of_a_full_model_has_a_value():
    cfg = tiny_model(
        pattern="M*|-E/*E/*E",
        mamba=replace(TINY_MAMBA, proj_bias=True),
        attention=replace(TINY_MODEL.attention, qk_norm=True, qkv_bias=True, output_bias=True),
        mlp=replace(TINY_MODEL.mlp, bias=True),
        moe=replace(TINY_MODEL.moe, d_latent=16),
    )
    model = build_model(cfg)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(torch.nan if tensor.is_floating_point() else 7)
    init_parameters(model, cfg, seed=0)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert not any(buffer.any() for buffer in model.buffers())
    assert not model.blocks[0].mixer.in_proj.bias.any()
    assert (model.blocks[1].mixer.q_norm.weight == 1).all()
