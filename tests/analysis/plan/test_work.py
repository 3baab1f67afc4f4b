"""What blocks do per token: products from modules, passes from recipes."""

from dataclasses import replace

import pytest

from nvfp4_train.analysis.plan.layout import Layout
from nvfp4_train.analysis.plan.local import BlockKey
from nvfp4_train.analysis.plan.work import Work, weight_bytes
from nvfp4_train.config.pattern import LayerKind
from nvfp4_train.model.peaks import Precision
from tests.support.configs import composed

LAYOUT = Layout(micro_batch_size=1, global_batch_size=8, sequence_length=8192)
NONE: frozenset[str] = frozenset()


def work(*overrides: str) -> Work:
    cfg = composed(*overrides)
    return Work(model=cfg.model, recipe=cfg.recipe)


def test_products_of_an_mlp():
    found = work("experiment=paper_12b_nvfp4").block(BlockKey(kind=LayerKind.mlp, kept=NONE), LAYOUT)
    assert [linear.flops for linear in found.linears] == [2 * 5120 * 20480] * 2
    assert {gemm.speed for linear in found.linears for gemm in linear.gemms} == {Precision.fp4}
    assert found.attention_flops == found.scan_flops == found.router_flops == 0


@pytest.mark.parametrize(
    ("recipe", "speed"), [("bf16", Precision.bf16), ("mxfp8", Precision.fp8), ("fp32", Precision.fp32)]
)
def test_the_recipe_decides_the_units(recipe: str, speed: Precision):
    found = work("model=paper_12b", f"recipe={recipe}").block(BlockKey(kind=LayerKind.mlp, kept=NONE), LAYOUT)
    assert {gemm.speed for linear in found.linears for gemm in linear.gemms} == {speed}


def test_kept_linears_are_not_quantized():
    key = BlockKey(kind=LayerKind.mlp, kept=frozenset({"down_proj"}))
    up, down = work("experiment=paper_12b_nvfp4").block(key, LAYOUT).linears
    assert down.quantized_bytes == (0, 0, 0)
    # two passes over BF16, and two operands of 4.5 bits; one of the weight, in square tiles
    assert up.quantized_bytes == (2 * 2 + 2 * 4.5 / 8, 2 * 2 + 2 * 4.5 / 8, 2 * 2 + 4.5 / 8)


def test_formats_without_a_global_scale_take_one_pass():
    found = work("model=paper_12b", "recipe=mxfp8").block(BlockKey(kind=LayerKind.mlp, kept=NONE), LAYOUT)
    x, dy, _ = found.linears[0].quantized_bytes
    assert x == dy == 2 + 2 * (1 + 1 / 32)


def test_experts_work_on_the_rows_that_a_token_makes():
    found = work("model=nemotron_3_super_120b_a12b").block(
        BlockKey(kind=LayerKind.moe, kept=NONE), replace(LAYOUT, dp_shard=64, ep=64)
    )
    experts = [linear for linear in found.linears if ".experts." in linear.name]
    assert [(linear.rows_per_token, linear.num_weights) for linear in experts] == [(22, 8)] * 2
    assert found.router_flops == 2 * 4096 * 512


def test_tensor_parallel_ranks_do_their_part():
    found = work("experiment=paper_12b_nvfp4")
    whole, part = (found.block(BlockKey(kind=LayerKind.attention, kept=NONE), replace(LAYOUT, tp=tp)) for tp in (1, 4))
    assert part.attention_flops == whole.attention_flops / 4
    assert sum(linear.flops for linear in part.linears) == sum(linear.flops for linear in whole.linears) / 4


def test_the_head_is_used_once_a_loss():
    assert [linear.name for linear in work("model=demo").ends(LAYOUT)] == ["lm_head"]
    names = [linear.name for linear in work("model=nemotron_3_super_120b_a12b").ends(LAYOUT)]
    assert names == ["lm_head"] * 3 + ["mtp.0.eh_proj"] * 2


@pytest.mark.parametrize(
    ("recipe", "expected"), [("bf16", 0.0), ("nvfp4", 4.5 / 8), ("nvfp4_1d_weights", 2 * 4.5 / 8), ("fp8", 1.0)]
)
def test_bytes_of_a_weight_that_stays_quantized(recipe: str, expected: float):
    assert weight_bytes(composed(f"recipe={recipe}").recipe.linear) == pytest.approx(expected)
