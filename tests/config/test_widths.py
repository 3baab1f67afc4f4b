from dataclasses import replace

import pytest
import torch

from nvfp4_train.config.moe import Activation
from nvfp4_train.config.recipe import KeepBf16
from nvfp4_train.config.widths import WIDTHS, quantized_linears
from nvfp4_train.model.hybrid import build_model
from nvfp4_train.model.linear import GroupedLinear
from tests.support.configs import composed, problems_of

TINY = composed("model=tiny").model
NONE = KeepBf16(first_blocks=0, last_blocks=0, modules=[], mtp=False)


def linears_of(cfg) -> dict[str, torch.nn.Linear | GroupedLinear]:
    with torch.device("meta"):
        model = build_model(cfg)
    return {
        name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear | GroupedLinear)
    }


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("tie_embeddings", [False, True])
@pytest.mark.parametrize("pattern", ["M*-M-", "ME|*-/*E/*E"])
@pytest.mark.parametrize("moe", [{"d_latent": 32}, {"shared_d_ff": 0}])
@pytest.mark.parametrize("share_depths", [False, True])
def test_names_are_those_of_the_model(activation, tie_embeddings, pattern, moe, share_depths):
    cfg = replace(
        TINY,
        pattern=pattern,
        mlp=replace(TINY.mlp, activation=activation),
        moe=replace(TINY.moe, activation=activation, **moe),
        mtp=replace(TINY.mtp, share_depths=share_depths),
        tie_embeddings=tie_embeddings,
    )
    assert sorted(quantized_linears(cfg, NONE)) == sorted(linears_of(cfg))
    kept = quantized_linears(cfg, replace(NONE, mtp=True))
    assert sorted(kept) == sorted(name for name in linears_of(cfg) if not name.startswith("mtp."))


def test_every_dim_of_every_linear_has_its_width():
    cfg = replace(TINY, pattern="M*-E", moe=replace(TINY.moe, d_latent=32))
    sizes = {width.value(cfg) for width in WIDTHS}
    for name, linear in linears_of(cfg).items():
        assert {linear.in_features, linear.out_features} <= sizes, name


def test_kept_linears_are_left_out():
    keep = KeepBf16(first_blocks=1, last_blocks=2, modules=["lm_head", "*.down_proj"])
    assert quantized_linears(TINY, keep) == [
        "blocks.1.mixer.qkv_proj",
        "blocks.1.mixer.o_proj",
        "blocks.2.mixer.up_proj",
    ]


def test_an_unknown_letter_is_left_out():
    cfg = object.__new__(type(TINY))
    for name in ("mlp", "tie_embeddings"):
        setattr(cfg, name, getattr(TINY, name))
    cfg.pattern = "X-"
    assert quantized_linears(cfg, NONE) == ["blocks.1.mixer.up_proj", "blocks.1.mixer.down_proj", "lm_head"]


@pytest.mark.parametrize(
    ("part", "changes", "key"),
    [
        ("", {"d_model": 72}, "model.d_model"),
        ("", {"vocab_size": 1000}, "model.vocab_size"),
        ("mamba", {"num_heads": 8, "d_head": 7, "d_state": 12}, "model.mamba.d_head"),
        ("attention", {"d_head": 4, "num_kv_heads": 1}, "model.attention.num_kv_heads"),
        ("attention", {"d_head": 8, "num_heads": 3, "num_kv_heads": 3}, "model.attention.d_head"),
        ("mlp", {"d_ff": 100}, "model.mlp.d_ff"),
        ("moe", {"d_ff": 100}, "model.moe.d_ff"),
        ("moe", {"shared_d_ff": 100}, "model.moe.shared_d_ff"),
        ("moe", {"d_latent": 100}, "model.moe.d_latent"),
    ],
)
def test_each_width_is_checked(part, changes, key):
    cfg = composed("experiment=tiny")
    model = replace(TINY, pattern="M*-E", **({part: replace(getattr(TINY, part), **changes)} if part else changes))
    problems = problems_of(lambda: replace(cfg, model=model, recipe=replace(cfg.recipe, keep_bf16=NONE)))
    assert "multiples of 16" in {problem.key: problem.rule for problem in problems}[key]


def test_every_width_has_a_case():
    (mark,) = test_each_width_is_checked.pytestmark
    filled_up = {"model.mamba.num_heads"}  # groups of rows that are not whole blocks of 16
    assert {key for _, _, key in mark.args[1]} == {width.key for width in WIDTHS} - filled_up


def test_rows_of_in_proj_are_filled_up():
    cfg = composed("experiment=tiny")
    model = replace(TINY, pattern="M*-E", mamba=replace(TINY.mamba, d_state=12))
    assert replace(cfg, model=model, recipe=replace(cfg.recipe, keep_bf16=NONE)).model == model
