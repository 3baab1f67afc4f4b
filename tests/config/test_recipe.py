from dataclasses import replace

import pytest

from nvfp4_train.config.recipe import ComputeDtype
from nvfp4_train.numerics.spec import (
    FP8_FORMATS,
    MX_FORMATS,
    Block,
    Format,
    GlobalScale,
    HadamardSigns,
    Rounding,
    ScaleRule,
)
from tests.support.configs import composed, problems_of

NVFP4 = composed("recipe=nvfp4").recipe


def test_the_published_recipe():
    cells = {
        name: (spec.format, spec.block, spec.rounding, spec.hadamard_size, spec.hadamard_signs, spec.global_scale)
        for name, spec in NVFP4.linear.operands.items()
    }
    nearest, stochastic = Rounding.nearest_even, Rounding.stochastic
    plain, rotated = (0, HadamardSigns.none, GlobalScale.tensor), (16, HadamardSigns.fixed, GlobalScale.tensor)
    assert cells == {
        "fprop.x": (Format.nvfp4, Block.row_1x16, nearest, *plain),
        "fprop.w": (Format.nvfp4, Block.tile_16x16, nearest, *plain),
        "dgrad.dy": (Format.nvfp4, Block.row_1x16, stochastic, *plain),
        "dgrad.w": (Format.nvfp4, Block.tile_16x16, nearest, *plain),
        "wgrad.x": (Format.nvfp4, Block.row_1x16, nearest, *rotated),
        "wgrad.dy": (Format.nvfp4, Block.row_1x16, stochastic, *rotated),
    }
    assert NVFP4.compute_dtype is ComputeDtype.bf16
    assert NVFP4.keep_bf16.modules == ["lm_head"]


def test_properties():
    assert NVFP4.linear.is_quantized
    assert (NVFP4.linear.dim_multiple, NVFP4.linear.token_multiple) == (16, 16)


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_high_precision_recipes_are_the_same_table(name):
    recipe = composed(f"recipe={name}").recipe
    assert {spec.format.value for spec in recipe.linear.operands.values()} == {name}
    assert (recipe.name, recipe.compute_dtype.value, recipe.linear.dim_multiple) == (name, name, 1)
    assert not recipe.linear.is_quantized


@pytest.mark.parametrize(
    ("name", "cells", "change"),
    [
        ("nvfp4_no_rht", {"wgrad.x", "wgrad.dy"}, {"hadamard_size": 0, "hadamard_signs": HadamardSigns.none}),
        ("nvfp4_no_sr", {"dgrad.dy", "wgrad.dy"}, {"rounding": Rounding.nearest_even}),
        ("nvfp4_1d_weights", {"fprop.w", "dgrad.w"}, {"block": Block.row_1x16}),
        ("nvfp4_all_blocks", set(), {}),
        ("nvfp4_row_scaled", {"fprop.x"}, {"global_scale": GlobalScale.row}),
        ("nvfp4_outer128", set(NVFP4.linear.operands), {"global_scale": GlobalScale.block_128}),
        ("nvfp4_clip_safe", {"dgrad.dy", "wgrad.dy"}, {"scale_rule": ScaleRule.clip_safe}),
        ("nvfp4_signs_per_call", {"wgrad.x", "wgrad.dy"}, {"hadamard_signs": HadamardSigns.per_call}),
        ("nvfp4_rht128", {"wgrad.x", "wgrad.dy"}, {"hadamard_size": 128}),
        (
            "nvfp4_four_over_six",
            {"fprop.x", "fprop.w", "dgrad.w"},
            {"scale_rule": ScaleRule.four_over_six_mae, "block_scale_max": 256},
        ),
    ],
)
def test_an_ablation_changes_one_technique_only(name, cells, change):
    recipe = composed(f"recipe={name}").recipe
    expected = {
        cell: replace(spec, **change) if cell in cells else spec for cell, spec in NVFP4.linear.operands.items()
    }
    assert recipe.name == name
    assert recipe.linear.operands == expected
    assert (recipe.keep_bf16 == NVFP4.keep_bf16) is (name != "nvfp4_all_blocks")


def cells_of(name):
    return composed(f"recipe={name}").recipe.linear.operands


def test_mxfp4_differs_from_nvfp4_in_the_format_only():
    blocks = {Block.row_1x16: Block.row_1x32, Block.tile_16x16: Block.tile_32x32}
    for name, spec in cells_of("mxfp4").items():
        nvfp4 = NVFP4.linear.operands[name]
        size = 2 * nvfp4.hadamard_size
        change = {"format": Format.mxfp4, "block": blocks[nvfp4.block], "hadamard_size": size}
        assert spec == replace(nvfp4, **change, global_scale=GlobalScale.none)
    assert {spec.scale_rule for spec in cells_of("mxfp4_floor").values()} == {ScaleRule.floor}


@pytest.mark.parametrize(
    ("name", "gradients"), [("mxfp8", Format.mxfp8_e4m3), ("mxfp8_e5m2", Format.mxfp8_e5m2), ("fp8", Format.fp8_e5m2)]
)
def test_recipes_of_eight_bits(name, gradients):
    cells = cells_of(name)
    others = Format.fp8_e4m3 if gradients in FP8_FORMATS else Format.mxfp8_e4m3
    assert {cell: spec.format for cell, spec in cells.items()} == {
        cell: gradients if cell.endswith("dy") else others for cell in cells
    }
    assert all(spec.block is (Block.row_1x32 if gradients in MX_FORMATS else Block.none) for spec in cells.values())


def test_delayed_scaling_is_fp8_with_a_history():
    assert cells_of("fp8_delayed") == {
        name: replace(spec, amax_history_length=1024) for name, spec in cells_of("fp8").items()
    }


def test_blocks_of_fp8_are_square_for_weights():
    blocks = {name: spec.block for name, spec in cells_of("fp8_block").items()}
    assert blocks == {name: Block.tile_128x128 if name.endswith(".w") else Block.row_1x128 for name in blocks}


def test_tokens_fill_the_groups_of_a_transform():
    assert composed("recipe=nvfp4_rht128").recipe.linear.token_multiple == 128


@pytest.mark.parametrize("experiment", ["demo", "tiny"])
def test_an_experiment_leaves_the_kept_blocks_to_the_recipe(experiment):
    keep = composed(f"experiment={experiment}", "recipe=nvfp4_all_blocks").recipe.keep_bf16
    assert (keep.first_blocks, keep.last_blocks, keep.modules) == (0, 0, ["lm_head"])
    assert composed(f"experiment={experiment}").recipe.keep_bf16.last_blocks == 2


def test_a_transform_needs_its_counterpart():
    plain = NVFP4.linear.fprop.x
    problems = problems_of(lambda: replace(NVFP4.linear.wgrad, x=plain))
    assert [problem.key for problem in problems] == ["x.hadamard_size", "x.hadamard_signs"]


@pytest.mark.parametrize(("row", "cell"), [("fprop", "x"), ("fprop", "w"), ("dgrad", "dy"), ("dgrad", "w")])
def test_a_transform_belongs_to_wgrad(row, cell):
    rotated = replace(getattr(NVFP4.linear, row), **{cell: NVFP4.linear.wgrad.x})
    problems = problems_of(lambda: replace(NVFP4.linear, **{row: rotated}))
    assert [problem.key for problem in problems] == [f"{row}.{cell}.hadamard_size"]


@pytest.mark.parametrize("key", ["first_blocks", "last_blocks"])
def test_kept_blocks_are_not_negative(key):
    assert [problem.key for problem in problems_of(lambda: replace(NVFP4.keep_bf16, **{key: -1}))] == [key]
