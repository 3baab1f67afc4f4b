"""The models of the YAML tree are as large as their names say, and build without memory in seconds."""

import time
from collections import Counter

import pytest
import torch

from nvfp4_train.config.load import load_config
from nvfp4_train.config.model import Position
from nvfp4_train.config.moe import Activation
from nvfp4_train.config.scheduler import WsdConfig
from nvfp4_train.config.tree import group_choices
from nvfp4_train.data.build import build_data
from nvfp4_train.data.error import DataError
from nvfp4_train.engine.build import prepare_model
from nvfp4_train.model.hybrid import HybridLM, build_model
from nvfp4_train.model.linear import GroupedLinear
from nvfp4_train.numerics.spec import Block, Format, Rounding
from tests.support.configs import composed

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


# What https://arxiv.org/abs/2509.25149 says of each run: tokens, sequences per step, largest learning rate, share of
# the decay, ends of the data phases, and the blocks that stay in BF16: the first and the last ones.
PAPER = {
    "12b_nvfp4": (10e12, 736, 4.5e-4, 0.2, [0.7, 0.9, 1.0], (2, 8)),
    "12b_fp8": (10e12, 736, 4.5e-4, 0.2, [0.7, 0.9, 1.0], (1, 2)),
    "8b_nvfp4": (1e12, 768, 8e-4, 0.15, [0.6, 1.0], (0, 8)),
    "8b_mxfp4": (1e12, 768, 8e-4, 0.15, [0.6, 1.0], (0, 8)),
    "8b_bf16": (1e12, 768, 8e-4, 0.15, [0.6, 1.0], None),
    "1b_ablation": (1e12, 768, 1.2e-3, 0.15, [0.6, 1.0], (0, 8)),  # the last four pairs of attention and FFN
}
MODELS = {
    # d_model, FFN, query and key-value heads, blocks of each kind
    "12b": (5120, 20480, 40, 8, {"M": 28, "-": 28, "*": 6}),
    "8b": (4096, 21504, 32, 4, {"M": 24, "-": 24, "*": 4}),
    "1b": (2048, 6144, 16, 8, {"*": 20, "-": 20}),
}


def test_every_experiment_of_the_paper_is_checked():
    assert sorted(EXPERIMENTS) == sorted(f"paper_{name}" for name in PAPER)


@pytest.mark.parametrize("name", PAPER)
def test_hyper_parameters_are_those_of_the_paper(name):
    tokens, sequences, max_lr, decay, phases, kept = PAPER[name]
    cfg = composed(f"experiment=paper_{name}")
    assert cfg.run.tokens == tokens
    assert (cfg.batch.sequence_length, cfg.batch.global_batch_size) == (8192, sequences)
    assert not cfg.batch.ramp.tokens
    assert isinstance(cfg.scheduler, WsdConfig)
    assert cfg.scheduler.max_lr == max_lr
    assert cfg.scheduler.min_lr == pytest.approx(max_lr / 100)
    assert cfg.scheduler.decay_fraction == decay
    assert (cfg.optimizer.beta1, cfg.optimizer.beta2) == (0.9, 0.95)
    assert cfg.optimizer.weight_decay == cfg.optimizer.weight_decay_start == 0.1
    if kept is not None:
        assert (cfg.recipe.keep_bf16.first_blocks, cfg.recipe.keep_bf16.last_blocks) == kept
        assert "lm_head" in cfg.recipe.keep_bf16.modules
    else:
        assert not cfg.recipe.linear.is_quantized
    assert [phase.end_fraction for phase in cfg.data.phases.values()] == phases
    blends = [phase.weights for phase in cfg.data.phases.values()]
    assert blends == [{source: 1.0} for source in cfg.data.sources]  # one after the other


@pytest.mark.parametrize("name", PAPER)
def test_models_are_those_of_the_paper(name):
    size = name.split("_")[0]
    d_model, d_ff, heads, kv_heads, kinds = MODELS[size]
    model = composed(f"experiment=paper_{name}").model
    assert (model.d_model, model.mlp.d_ff) == (d_model, d_ff)
    assert (model.attention.num_heads, model.attention.num_kv_heads, model.attention.d_head) == (heads, kv_heads, 128)
    assert Counter(model.pattern) == kinds
    assert model.mlp.activation is Activation.squared_relu
    assert model.attention.position is (Position.rope if size == "1b" else Position.none)
    assert [model.mlp.bias, model.attention.qkv_bias, model.attention.output_bias, model.tie_embeddings] == [False] * 4
    if size != "1b":
        assert (model.mamba.num_groups, model.mamba.d_state, model.mamba.d_conv) == (8, 128, 4)
        assert model.mamba.d_inner == 2 * d_model


def test_the_recipes_are_those_of_the_paper():
    nvfp4 = composed("experiment=paper_12b_nvfp4").recipe.linear.operands
    assert {spec.format for spec in nvfp4.values()} == {Format.nvfp4}
    assert {name for name, spec in nvfp4.items() if spec.block is Block.tile_16x16} == {"fprop.w", "dgrad.w"}
    assert {name for name, spec in nvfp4.items() if spec.rounding is Rounding.stochastic} == {"dgrad.dy", "wgrad.dy"}
    assert {name: spec.hadamard_size for name, spec in nvfp4.items() if spec.hadamard_size} == {
        "wgrad.x": 16,
        "wgrad.dy": 16,
    }
    fp8 = composed("experiment=paper_12b_fp8").recipe.linear.operands
    assert {spec.format for spec in fp8.values()} == {Format.fp8_e4m3}
    assert {name: spec.block for name, spec in fp8.items()} == {
        name: Block.tile_128x128 if name.endswith(".w") else Block.row_1x128 for name in fp8
    }
    mxfp4 = composed("experiment=paper_8b_mxfp4").recipe.linear.operands
    assert {spec.format for spec in mxfp4.values()} == {Format.mxfp4}
    assert mxfp4["wgrad.x"].hadamard_size == 32


def test_the_share_of_linears_in_bf16_is_that_of_the_paper():
    """16 % of the 12B's and about 15 % of the 8B's, and no attention among them."""
    for name, share in (("12b_nvfp4", 20 / 124), ("8b_nvfp4", 16 / 104)):
        cfg = composed(f"experiment=paper_{name}")
        plan = prepare_model(cfg.model, cfg.recipe, seed=0).plan
        in_blocks = [row for row in plan.coverage if row.module.startswith("blocks.")]
        kept = [row for row in in_blocks if row.recipe == "bf16"]
        assert len(kept) / len(in_blocks) == pytest.approx(share)
        assert not any("qkv_proj" in row.module for row in kept)


def test_missing_data_are_one_clear_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg = composed("experiment=paper_12b_nvfp4", f"data.cache_dir={tmp_path}")
    with pytest.raises(DataError, match=r"data/paper/phase_1\n +found: +no .bin/.idx pair(.|\n)*data.sources"):
        build_data(cfg.data, batch=cfg.batch, run=cfg.run, vocab_size=cfg.model.vocab_size)
