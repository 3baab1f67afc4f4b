from dataclasses import replace

import pytest

from nvfp4_train.config.model import Position
from nvfp4_train.config.pattern import LayerKind
from tests.support.configs import composed, load_problems, problems_of

MODEL = composed().model


def test_properties():
    tiny = composed("model=tiny").model
    assert tiny.layer_kinds == (LayerKind.mamba, LayerKind.attention, LayerKind.mlp, LayerKind.mamba, LayerKind.mlp)
    assert tiny.mamba.d_inner == 128


@pytest.mark.parametrize(
    ("part", "changes", "keys"),
    [
        (MODEL, {"pattern": "MxM"}, ["pattern"]),
        (MODEL, {"pattern": ""}, ["pattern"]),
        (MODEL, {"d_model": 0, "vocab_size": -1}, ["d_model", "vocab_size"]),
        (MODEL, {"norm_eps": 0.0}, ["norm_eps"]),
        (MODEL, {"init_std": -0.1}, ["init_std"]),
        (MODEL.mamba, {"num_groups": 0}, ["num_groups"]),
        (MODEL.mamba, {"num_groups": 3}, ["num_heads"]),
        (
            MODEL.mamba,
            {"d_head": 0, "d_state": 0, "d_conv": 0, "chunk_size": 0},
            ["d_head", "d_state", "d_conv", "chunk_size"],
        ),
        (MODEL.mamba, {"dt_min": -1.0}, ["dt_min"]),
        (MODEL.mamba, {"dt_min": 1.0, "dt_max": 0.5}, ["dt_min"]),
        (MODEL.mamba, {"dt_min": 0.0, "dt_max": 0.0}, ["dt_max"]),
        (MODEL.mamba, {"dt_max": float("nan")}, ["dt_min"]),
        (MODEL.mamba, {"dt_init_max": float("inf")}, ["dt_init_min"]),
        (MODEL, {"d_model": 10**30}, ["d_model"]),
        (MODEL.attention, {"window_tokens": -1}, ["window_tokens"]),
        (MODEL.mamba, {"dt_init_floor": 0.0}, ["dt_init_min"]),
        (MODEL.mamba, {"dt_init_max": 1e-5}, ["dt_init_min"]),
        (MODEL.attention, {"num_kv_heads": 0}, ["num_kv_heads"]),
        (MODEL.attention, {"num_kv_heads": 3}, ["num_heads"]),
        (MODEL.attention, {"d_head": 0, "rope_theta": 0.0}, ["d_head", "rope_theta"]),
        (MODEL.attention, {"d_head": 33, "position": Position.rope}, ["d_head"]),
        (MODEL.mlp, {"d_ff": 0}, ["d_ff"]),
    ],
)
def test_a_violated_rule_names_its_key(part, changes, keys):
    assert [problem.key for problem in problems_of(lambda: replace(part, **changes))] == keys


def test_mistakes_in_all_parts_of_a_model_are_reported_together():
    found = load_problems(
        "experiment=tiny",
        "model.pattern=M-X/E/*",
        "model.d_model=0",
        "model.mamba.num_groups=3",
        "model.mamba.kernels=cuda",
        "model.attention.num_kv_heads=3",
        "model.attention.window_tokens=-4",
        "model.mlp.activation=relu",
        "model.moe.top_k=99",
        "model.mtp.loss_weight=-1",
    )
    assert found.keys() == {
        "model.pattern",
        "model.d_model",
        "model.mamba.num_heads",
        "model.mamba.kernels",
        "model.attention.num_heads",
        "model.attention.window_tokens",
        "model.mlp.activation",
        "model.moe.top_k",
        "model.mtp.loss_weight",
    }
    assert "'X' at position 2" in found["model.pattern"].rule


def test_an_odd_head_is_fine_without_rope():
    assert replace(MODEL.attention, d_head=33).d_head == 33


def test_the_demo_has_about_8_million_parameters():
    d_model, mamba, attention = MODEL.d_model, MODEL.mamba, MODEL.attention
    in_proj = 2 * mamba.d_inner + 2 * mamba.num_groups * mamba.d_state + mamba.num_heads
    linears = {
        LayerKind.mamba: d_model * (in_proj + mamba.d_inner),
        LayerKind.attention: d_model * attention.d_head * 2 * (attention.num_heads + attention.num_kv_heads),
        LayerKind.mlp: 2 * d_model * MODEL.mlp.d_ff,
    }
    count = sum(linears[kind] for kind in MODEL.layer_kinds) + 2 * MODEL.vocab_size * d_model
    assert 7e6 < count < 9e6
