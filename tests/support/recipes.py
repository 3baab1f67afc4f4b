"""Recipes built in code, so that a test says which technique it switches off."""

from dataclasses import replace

from nvfp4_train.config.recipe import ComputeDtype, DgradRow, FpropRow, KeepBf16, LinearRecipe, RecipeConfig, WgradRow
from nvfp4_train.numerics.spec import (
    Block,
    Format,
    GemmMode,
    GlobalScale,
    HadamardSigns,
    OperandSpec,
    Rounding,
)

KEEP_NONE = KeepBf16(first_blocks=0, last_blocks=0, modules=[])


def nvfp4_spec(
    *, block: Block = Block.row_1x16, rounding: Rounding = Rounding.nearest_even, hadamard: bool = False
) -> OperandSpec:
    return OperandSpec(
        format=Format.nvfp4,
        block=block,
        rounding=rounding,
        hadamard_size=16 if hadamard else 0,
        hadamard_signs=HadamardSigns.fixed if hadamard else HadamardSigns.none,
        global_scale=GlobalScale.tensor,
    )


def cast_spec(format: Format) -> OperandSpec:
    return OperandSpec(format=format, block=Block.none, rounding=Rounding.nearest_even)


def nvfp4_table(
    *,
    weight_block: Block = Block.tile_16x16,
    gradient_rounding: Rounding = Rounding.stochastic,
    hadamard: bool = True,
) -> LinearRecipe:
    weight = nvfp4_spec(block=weight_block)
    return LinearRecipe(
        fprop=FpropRow(x=nvfp4_spec(), w=weight),
        dgrad=DgradRow(dy=nvfp4_spec(rounding=gradient_rounding), w=weight),
        wgrad=WgradRow(x=nvfp4_spec(hadamard=hadamard), dy=nvfp4_spec(rounding=gradient_rounding, hadamard=hadamard)),
    )


def cast_table(format: Format) -> LinearRecipe:
    cell = cast_spec(format)
    return LinearRecipe(
        fprop=FpropRow(x=cell, w=cell), dgrad=DgradRow(dy=cell, w=cell), wgrad=WgradRow(x=cell, dy=cell)
    )


def nvfp4_recipe(linear: LinearRecipe | None = None, *, keep: KeepBf16 = KEEP_NONE) -> RecipeConfig:
    return RecipeConfig(
        name="nvfp4",
        compute_dtype=ComputeDtype.bf16,
        gemm=GemmMode.fp32_exact,
        linear=linear or nvfp4_table(),
        keep_bf16=keep,
    )


def cast_recipe(dtype: ComputeDtype) -> RecipeConfig:
    return replace(
        nvfp4_recipe(cast_table(Format(dtype.value))), name=dtype.value, compute_dtype=dtype, gemm=GemmMode.fp32_exact
    )
