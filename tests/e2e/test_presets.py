"""The models of the YAML tree are as large as their names say, and build without memory in seconds."""

import time

import pytest
import torch

from nvfp4_train.config.load import load_config
from nvfp4_train.config.tree import group_choices
from nvfp4_train.model.hybrid import HybridLM, build_model
from nvfp4_train.model.linear import GroupedLinear

# Parameters in billions, without and with multi-token prediction, and those that one token uses.
PARAMETERS = {
    "demo": (0.008177, 0.008177, 0.008177),
    "tiny": (0.000168, 0.000168, 0.000168),
    "hybrid_130m": (0.13245, 0.13245, 0.13245),
    "hybrid_340m": (0.34171, 0.34171, 0.34171),
    "llama_130m": (0.12585, 0.12585, 0.12585),
    "mamba2_130m": (0.1333, 0.1333, 0.1333),
    "paper_1b": (1.2919, 1.2919, 1.2919),
    "paper_8b": (8.0841, 8.0841, 8.0841),
    "paper_12b": (12.310, 12.310, 12.310),
    "nemotron_h_8b": (8.1009, 8.1009, 8.1009),
    "nemotron_3_nano_30b_a3b": (31.578, 31.578, 3.580),
    "nemotron_3_super_120b_a12b": (120.669, 123.611, 12.754),
}
BLOCKS = {"paper_12b": 62, "paper_8b": 52, "nemotron_h_8b": 52, "nemotron_3_nano_30b_a3b": 52}
BLOCKS |= {"nemotron_3_super_120b_a12b": 88, "paper_1b": 40}
EXPERIMENTS = [name for name in group_choices()["experiment"] if name.startswith("paper_")]


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def build(*overrides: str) -> tuple[HybridLM, float]:
    start = time.perf_counter()
    cfg = load_config(list(overrides)).cfg
    with torch.device("meta"):
        model = build_model(cfg.model)
    return model, time.perf_counter() - start


def test_every_model_is_counted():
    assert sorted(PARAMETERS) == sorted(group_choices()["model"])


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name):
    model, seconds = build(f"model={name}", "recipe=bf16")
    main, whole, active = (value * 1e9 for value in PARAMETERS[name])
    idle = sum(
        module.weight.numel() * (1 - module.uses_per_token / module.num_experts)
        for prefix, module in model.named_modules()
        if isinstance(module, GroupedLinear) and not prefix.startswith("mtp.")
    )
    found = count(model) - count(model.mtp)
    assert found == pytest.approx(main, rel=2e-3)
    assert count(model) == pytest.approx(whole, rel=2e-3)
    assert found - idle == pytest.approx(active, rel=2e-3)
    assert len(model.blocks) == BLOCKS.get(name, len(model.blocks))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert seconds < 10


def test_super_shares_its_two_depths():
    model, _ = build("model=nemotron_3_super_120b_a12b", "recipe=bf16")
    assert (model.num_mtp_depths, len(model.mtp)) == (2, 1)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiments_of_the_paper(name):
    cfg = load_config([f"experiment={name}"]).cfg
    is_12b = name.startswith("paper_12b")
    assert cfg.run.tokens == (10e12 if is_12b else 1e12)
    assert cfg.batch.tokens == (6_029_312 if is_12b else 6_291_456)
    assert (cfg.scheduler.max_lr / cfg.scheduler.min_lr) == pytest.approx(100)
    assert cfg.scheduler.decay_fraction == (0.2 if is_12b else 0.15)
    assert (cfg.optimizer.beta1, cfg.optimizer.beta2, cfg.optimizer.weight_decay) == (0.9, 0.95, 0.1)


def test_blocks_that_the_paper_keeps():
    twelve, eight, one = (
        load_config([f"experiment=paper_{name}"]).cfg for name in ("12b_nvfp4", "8b_nvfp4", "1b_ablation")
    )
    assert [cfg.scheduler.max_lr for cfg in (twelve, eight, one)] == [4.5e-4, 8e-4, 1.2e-3]
    assert [(cfg.recipe.keep_bf16.first_blocks, cfg.recipe.keep_bf16.last_blocks) for cfg in (twelve, eight, one)] == [
        (2, 8),
        (0, 8),
        (0, 8),
    ]
    assert not any("*" in cfg.model.pattern[-8:] for cfg in (twelve, eight))
