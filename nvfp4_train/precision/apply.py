"""The precision pass: Linears become QuantizedLinears, the grouped Linears of experts QuantizedExperts."""

from functools import partial

import torch
from torch import nn

from nvfp4_train.config.problem import Problem, require
from nvfp4_train.config.recipe import ComputeDtype, DgradRow, FpropRow, LinearRecipe, RecipeConfig, WgradRow
from nvfp4_train.model.linear import GroupedLinear
from nvfp4_train.numerics.spec import Block, Format, GemmMode, OperandSpec, Rounding
from nvfp4_train.precision.coverage import CoverageRow, PrecisionPlan, gemm_precisions, low_precision_gemms
from nvfp4_train.precision.experts import QuantizedExperts
from nvfp4_train.precision.extensions import after_step, extension_problems, list_extensions
from nvfp4_train.precision.linear import LinearPrecision, QuantizedLinear
from nvfp4_train.precision.position import RoundingPosition
from nvfp4_train.precision.rules import Placement, place_linears, rule_problems

TORCH_DTYPE = {ComputeDtype.fp32: torch.float32, ComputeDtype.bf16: torch.bfloat16}


def apply_precision(model: nn.Module, cfg: RecipeConfig, *, seed: int) -> PrecisionPlan:
    """Swap every Linear of `model` for its quantized counterpart in place; works on the meta device, before sharding.

    Parameters are handed over, not copied, and keep their names. `model.compute_dtype` becomes the recipe's.

    Args:
        model: Has its residual blocks in `model.blocks`.
        cfg: The recipe, and which Linears it leaves alone: those compute in its compute dtype.
        seed: Seed of the random streams of stochastic rounding.

    Returns:
        The position that the engine moves, and what every Linear runs and why.

    Raises:
        ConfigError: with all rules that match nothing, all Linears whose dims the recipe's blocks do not divide, and
            all extensions that cannot be found or called.
    """
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | GroupedLinear)}
    names, num_blocks = list(linears), len(model.blocks)  # type: ignore[arg-type]
    placements = place_linears(names, cfg.keep_bf16, num_blocks=num_blocks, recipe_name=cfg.name)
    extensions = list_extensions(cfg)
    require(
        extension_problems(extensions)
        + rule_problems(names, cfg.keep_bf16, num_blocks=num_blocks)
        + _gemm_problems(cfg)
        + _shape_problems(linears, placements, cfg)
    )
    position = RoundingPosition(seed=seed)
    compute_recipe = compute_dtype_recipe(cfg.compute_dtype)
    rows = []
    for name, linear in linears.items():
        placement = placements[name]
        precision = LinearPrecision(
            layer=name,
            recipe_name=cfg.compute_dtype.value if placement.is_kept else cfg.name,
            recipe=compute_recipe if placement.is_kept else cfg.linear,
            high_precision=compute_recipe,
            gemm=cfg.gemm,
        )
        model.set_submodule(name, _quantized(linear, precision=precision, position=position))
        rows.append(_coverage_row(linear, precision=precision, why=placement.why))
    model.compute_dtype = TORCH_DTYPE[cfg.compute_dtype]  # type: ignore[assignment]
    return PrecisionPlan(
        position=position,
        recipe=cfg.name,
        compute_dtype=cfg.compute_dtype,
        coverage=rows,
        extensions=[extension.record() for extension in extensions],
        after_step=partial(after_step, cfg) if cfg.after_optimizer else None,
    )


def _quantized(
    linear: nn.Linear | GroupedLinear, *, precision: LinearPrecision, position: RoundingPosition
) -> QuantizedLinear | QuantizedExperts:
    if isinstance(linear, GroupedLinear):
        return QuantizedExperts(linear, precision=precision, position=position)
    return QuantizedLinear.from_linear(linear, precision=precision, position=position)


def _coverage_row(linear: nn.Linear | GroupedLinear, *, precision: LinearPrecision, why: str) -> CoverageRow:
    num_experts, uses_per_token = (
        (linear.num_experts, linear.uses_per_token) if isinstance(linear, GroupedLinear) else (1, 1)
    )
    return CoverageRow(
        module=precision.layer,
        in_features=linear.in_features,
        out_features=linear.out_features,
        recipe=precision.recipe_name,
        why=why,
        low_precision_gemms=low_precision_gemms(precision.recipe),
        gemm_precisions=gemm_precisions(precision.recipe),
        num_experts=num_experts,
        uses_per_token=uses_per_token,
    )


def compute_dtype_recipe(dtype: ComputeDtype) -> LinearRecipe:
    """Return the table whose six operands are casts to the compute dtype: for kept Linears and unrounded evaluation."""
    cell = OperandSpec(format=Format(dtype.value), block=Block.none, rounding=Rounding.nearest_even)
    return LinearRecipe(
        fprop=FpropRow(x=cell, w=cell), dgrad=DgradRow(dy=cell, w=cell), wgrad=WgradRow(x=cell, dy=cell)
    )


def _gemm_problems(cfg: RecipeConfig) -> list[Problem]:
    has_fp32 = cfg.compute_dtype is ComputeDtype.fp32 or any(
        spec.format is Format.fp32 for spec in cfg.linear.operands.values()
    )
    if cfg.gemm is not GemmMode.bf16_exact or not has_fp32:
        return []
    return [
        Problem(
            key="recipe.gemm",
            value=cfg.gemm.value,
            rule="BF16 products cannot hold FP32 operands, which this recipe has",
            fix="use auto or fp32_exact",
        )
    ]


def _shape_problems(
    linears: dict[str, nn.Linear | GroupedLinear], placements: dict[str, Placement], cfg: RecipeConfig
) -> list[Problem]:
    multiple = cfg.linear.dim_multiple
    return [
        Problem(
            key=f"{name}.{dim}",
            value=getattr(linear, dim),
            rule=f"must be a multiple of {multiple}, the block of recipe {cfg.name}",
            fix=f"change the widths of the model, or add {name} to recipe.keep_bf16.modules",
        )
        for name, linear in linears.items()
        if not placements[name].is_kept
        for dim in ("in_features", "out_features")
        if getattr(linear, dim) % multiple
    ]
