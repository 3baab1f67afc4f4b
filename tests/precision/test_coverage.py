"""The coverage report."""

import json
from dataclasses import replace

import pytest

from nvfp4_train.config.recipe import ComputeDtype, KeepBf16, LinearRecipe
from nvfp4_train.numerics.spec import Format
from nvfp4_train.precision.apply import apply_precision
from nvfp4_train.precision.coverage import (
    PrecisionPlan,
    coverage_report,
    format_coverage,
    gemm_precisions,
    low_precision_gemms,
)
from tests.support.blocks import TinyBlocks
from tests.support.configs import composed
from tests.support.recipes import cast_recipe, cast_table, nvfp4_recipe, nvfp4_table


def make_plan(linear: LinearRecipe | None = None, **widths: int) -> PrecisionPlan:
    keep = KeepBf16(first_blocks=0, last_blocks=1, modules=["lm_head"])
    return apply_precision(TinyBlocks(**widths), nvfp4_recipe(linear, keep=keep), seed=0)


def only_fprop() -> LinearRecipe:
    return LinearRecipe(
        fprop=nvfp4_table().fprop, dgrad=cast_table(Format.bf16).dgrad, wgrad=cast_table(Format.bf16).wgrad
    )


def test_gemms_count_as_low_precision_when_both_operands_have_four_bits():
    assert low_precision_gemms(nvfp4_table()) == ["fprop", "dgrad", "wgrad"]
    assert low_precision_gemms(cast_table(Format.bf16)) == []
    assert low_precision_gemms(only_fprop()) == ["fprop"]


def test_the_wider_operand_decides_at_which_speed_a_gemm_runs():
    assert gemm_precisions(only_fprop()) == {"fprop": "fp4", "dgrad": "bf16", "wgrad": "bf16"}
    assert set(gemm_precisions(cast_table(Format.fp32)).values()) == {"fp32"}
    four, eight = nvfp4_table(), composed("recipe=mxfp8").recipe.linear
    mixed = LinearRecipe(fprop=replace(four.fprop, w=eight.fprop.w), dgrad=four.dgrad, wgrad=eight.wgrad)
    assert gemm_precisions(mixed) == {"fprop": "fp8", "dgrad": "fp4", "wgrad": "fp8"}
    wide = replace(four.fprop, x=cast_table(Format.fp32).fprop.x)
    assert gemm_precisions(replace(mixed, fprop=wide))["fprop"] == "fp32"


def test_the_share_counts_flops_and_not_modules():
    # 3 blocks with 2 Linears of 32 * 64 and a head of 32 * 48; 2 blocks are quantized
    assert make_plan().flops_share_low_precision == pytest.approx(4 * 64 / (6 * 64 + 48))
    assert make_plan(only_fprop()).flops_share_low_precision == pytest.approx(4 * 64 / (6 * 64 + 48) / 3)
    assert apply_precision(TinyBlocks(), cast_recipe(ComputeDtype.bf16), seed=0).flops_share_low_precision == 0.0


def test_the_report_holds_every_linear_and_the_totals():
    plan = make_plan()
    report = json.loads(json.dumps(coverage_report(plan)))
    assert report["recipe"] == "nvfp4"
    assert report["compute_dtype"] == "bf16"
    assert report["num_linears"] == 7
    assert report["num_low_precision"] == 4
    assert report["flops_share_low_precision"] == plan.flops_share_low_precision
    assert report["linears"][0] == {
        "module": "blocks.0.up_proj",
        "in_features": 32,
        "out_features": 64,
        "recipe": "nvfp4",
        "why": "recipe nvfp4",
        "low_precision_gemms": ["fprop", "dgrad", "wgrad"],
        "gemm_precisions": {"fprop": "fp4", "dgrad": "fp4", "wgrad": "fp4"},
        "num_experts": 1,
        "uses_per_token": 1,
        "weight_gather": "bf16",
    }
    assert report["linears"][-1]["why"] == "modules: lm_head"


def test_the_table_folds_equal_blocks():
    assert format_coverage(make_plan()).splitlines() == [
        "module                  shape     recipe  why",
        "blocks.{0-1}.up_proj    32 -> 64  nvfp4   recipe nvfp4",
        "blocks.{0-1}.down_proj  64 -> 32  nvfp4   recipe nvfp4",
        "blocks.2.up_proj        32 -> 64  bf16    last_blocks: block 2 of 3",
        "blocks.2.down_proj      64 -> 32  bf16    last_blocks: block 2 of 3",
        "lm_head                 32 -> 48  bf16    modules: lm_head",
        "4 of 7 Linears, 59.3 % of their FLOPs in low precision; the others compute in bf16",
    ]


def test_the_table_shows_gaps_between_blocks():
    keep = KeepBf16(first_blocks=0, last_blocks=0, modules=["blocks.1.*", "blocks.3.*", "lm_head"])
    plan = apply_precision(TinyBlocks(num_blocks=7), nvfp4_recipe(keep=keep), seed=0)
    assert "blocks.{0,2,4-6}.up_proj" in format_coverage(plan)
