from dataclasses import replace

import pytest

from nvfp4_train.config.recipe import ComputeDtype
from nvfp4_train.numerics.spec import Block, Format, GlobalScale, HadamardSigns, Rounding
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
    assert NVFP4.linear.dim_multiple == 16


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
