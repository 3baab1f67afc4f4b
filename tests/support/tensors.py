"""Tensors for tests of the numerics, and a comparison of bits."""

import torch
from torch import Tensor

from nvfp4_train.numerics.spec import Block, Format, GlobalScale, HadamardSigns, OperandSpec, Rounding, ScaleRule

FILLS = ("normal", "wide", "tiny", "subnormal", "huge", "ties", "zeros", "sparse", "inf", "nan")


def operand_spec(
    *,
    block: Block = Block.row_1x16,
    rounding: Rounding = Rounding.nearest_even,
    hadamard: HadamardSigns | None = None,
    hadamard_size: int = 16,
    global_scale: GlobalScale = GlobalScale.tensor,
    scale_rule: ScaleRule = ScaleRule.amax,
    block_scale_max: int = 448,
) -> OperandSpec:
    """An NVFP4 operand; `hadamard` gives the signs of a transform, None is no transform."""
    return OperandSpec(
        format=Format.nvfp4,
        block=block,
        rounding=rounding,
        hadamard_size=0 if hadamard is None else hadamard_size,
        hadamard_signs=hadamard or HadamardSigns.none,
        global_scale=global_scale,
        scale_rule=scale_rule,
        block_scale_max=block_scale_max,
    )


def format_spec(
    format: Format,
    *,
    block: Block | None = None,
    global_scale: GlobalScale | None = None,
    rounding: Rounding = Rounding.nearest_even,
    scale_rule: ScaleRule = ScaleRule.amax,
    hadamard: HadamardSigns | None = None,
    hadamard_size: int = 32,
) -> OperandSpec:
    """An operand of any low-precision format; blocks lie along rows and FP32 scales are one per tensor unless said."""
    default_block = Block.row_1x16 if format is Format.nvfp4 else Block.row_1x32 if "mx" in format else Block.none
    block = default_block if block is None else block
    has_fp32_scale = "mx" not in format and not block.endswith("128")
    default_scale = GlobalScale.tensor if has_fp32_scale else GlobalScale.none
    return OperandSpec(
        format=format,
        block=block,
        rounding=rounding,
        hadamard_size=0 if hadamard is None else hadamard_size,
        hadamard_signs=hadamard or HadamardSigns.none,
        global_scale=default_scale if global_scale is None else global_scale,
        scale_rule=scale_rule,
    )


def filled(rows: int, columns: int, *, dtype: torch.dtype, fill: str, seed: int) -> Tensor:
    """A matrix with one kind of values, see FILLS."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(rows, columns, generator=generator)
    uniform = torch.rand(rows, columns, generator=generator)
    match fill:
        case "normal":
            x = normal
        case "wide":
            x = normal * 2.0 ** torch.round(uniform * 40 - 20)
        case "tiny":
            x = normal * 1e-30
        case "subnormal":
            x = normal * 1e-39
        case "huge":
            x = (normal / 4).clamp(-1, 1) * 3e38
        case "ties":
            ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
            powers = 2.0 ** torch.randint(-9, 9, (rows, 1), generator=generator)
            x = ties[torch.randint(0, 8, (rows, columns), generator=generator)] * normal.sign() * powers
        case "zeros":
            x = torch.where(uniform < 0.5, 0.0, -0.0)
        case "sparse":
            x = torch.where(uniform < 0.1, normal, -0.0)
        case "inf" | "nan":
            x = torch.where(uniform < 2 / (rows * columns), float(fill), normal)
        case _:
            raise ValueError(f"fill {fill} is none of {FILLS}")
    return x.to(dtype)


def same_bits(got: Tensor, expected: Tensor) -> bool:
    """Whether dtype, shape and bits agree; any NaN equals any NaN."""
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return False
    if not got.dtype.is_floating_point:
        return torch.equal(got, expected)
    bits = {2: torch.int16, 4: torch.int32}[got.element_size()]
    same = got.contiguous().view(bits) == expected.contiguous().view(bits)
    return bool((same | (got.isnan() & expected.isnan())).all())
