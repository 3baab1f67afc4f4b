"""How one GEMM operand is rounded: the cell of a recipe table.

Everything here is data and imports nothing heavy, so that the configuration layer can use it as its schema. Enum
members are named like their values because OmegaConf matches members by name.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Format(StrEnum):
    """Element format of a GEMM operand."""

    fp32 = "fp32"
    bf16 = "bf16"
    nvfp4 = "nvfp4"


class Block(StrEnum):
    """Which elements share one block scale; the last dim is the GEMM's contraction dim."""

    none = "none"  # no block scale: fp32 and bf16
    row_1x16 = "row_1x16"
    tile_16x16 = "tile_16x16"


class Rounding(StrEnum):
    """How an element is rounded to the grid; scales are always rounded to nearest even."""

    nearest_even = "nearest_even"
    stochastic = "stochastic"


class HadamardSigns(StrEnum):
    """Signs put on the elements of a group before the Hadamard transform."""

    none = "none"
    fixed = "fixed"  # the published mask 0xD7E8, the same for every tensor, layer, step and rank


class GlobalScale(StrEnum):
    """Which elements share one FP32 scale above the block scales."""

    none = "none"
    tensor = "tensor"
    row = "row"


class ScaleRule(StrEnum):
    """How a block's scale is chosen from its elements."""

    amax = "amax"  # map the block maximum to the largest code
    four_over_six_mae = "four_over_six_mae"  # map it to 6 or to 4, whichever has the lower absolute error
    four_over_six_mse = "four_over_six_mse"  # the same with the squared error


class GemmMode(StrEnum):
    """How the emulated GEMM multiplies its exact operands."""

    auto = "auto"  # bf16_exact where the machine multiplies BF16 fast, fp32_exact elsewhere
    bf16_exact = "bf16_exact"
    fp32_exact = "fp32_exact"


HIGH_PRECISION_FORMATS = (Format.fp32, Format.bf16)
BLOCK_SIZE = {Block.row_1x16: 16, Block.tile_16x16: 16}
HADAMARD_SIGN_MASK = {HadamardSigns.none: 0, HadamardSigns.fixed: 0xD7E8}  # bit i set: element i is negated

EXTENSION_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")  # package.module:name


@dataclass(kw_only=True, slots=True)
class OperandSpec:
    """How one GEMM operand becomes low precision.

    Args:
        format: Element format.
        block: Elements that share a block scale.
        rounding: Rounding of the elements.
        hadamard_size: Group length of the Hadamard transform along the contraction dim before quantization; 0 is none.
        hadamard_signs: Signs of that transform.
        global_scale: Elements that share the FP32 scale above the block scales.
        scale_rule: How the block scale is chosen.
        block_scale_max: Largest block scale that the FP32 scale aims at: 448 (E4M3's maximum) or 256 (four-over-six).
        quantizer: Import path `package.module:function` of code that rounds in place of the built-in one; everything
            above says what it is given.
        args: Its further keyword arguments.

    Raises:
        ValueError: for a combination that has no definition; the message names the field, what was found and the rule.
    """

    format: Format
    block: Block
    rounding: Rounding
    hadamard_size: int = 0
    hadamard_signs: HadamardSigns = HadamardSigns.none
    global_scale: GlobalScale = GlobalScale.none
    scale_rule: ScaleRule = ScaleRule.amax
    block_scale_max: int = 448
    quantizer: str | None = None
    args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        problems = _operand_problems(self) + _quantizer_problems(self)
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def is_quantized(self) -> bool:
        """Whether the operand leaves the compute dtype."""
        return self.format not in HIGH_PRECISION_FORMATS


def _operand_problems(spec: OperandSpec) -> list[str]:
    if not spec.is_quantized:
        return _high_precision_problems(spec)
    problems = []
    if spec.block not in BLOCK_SIZE:
        problems.append(f"block: found {spec.block}, {spec.format} needs one of {', '.join(BLOCK_SIZE)}")
    if spec.global_scale is GlobalScale.none:
        problems.append(f"global_scale: found none, {spec.format} needs tensor or row")
    if spec.hadamard_size not in (0, 16):
        problems.append(f"hadamard_size: found {spec.hadamard_size}, expected 0 (no transform) or 16")
    if spec.hadamard_size == 0 and spec.hadamard_signs is not HadamardSigns.none:
        problems.append(
            f"hadamard_signs: found {spec.hadamard_signs} without a transform; set hadamard_size: 16 or signs: none"
        )
    if spec.block_scale_max not in (256, 448):
        problems.append(f"block_scale_max: found {spec.block_scale_max}, expected 448 or 256")
    problems += _row_scale_problems(spec) + _four_over_six_problems(spec)
    return problems


def _high_precision_problems(spec: OperandSpec) -> list[str]:
    fixed = {
        "block": (spec.block, Block.none),
        "rounding": (spec.rounding, Rounding.nearest_even),
        "hadamard_size": (spec.hadamard_size, 0),
        "global_scale": (spec.global_scale, GlobalScale.none),
        "scale_rule": (spec.scale_rule, ScaleRule.amax),
    }
    return [
        f"{key}: found {found}, a {spec.format} operand has only {only}"
        for key, (found, only) in fixed.items()
        if found != only
    ]


def _row_scale_problems(spec: OperandSpec) -> list[str]:
    if spec.global_scale is not GlobalScale.row:
        return []
    if spec.block is Block.row_1x16 and spec.hadamard_size == 0 and spec.rounding is Rounding.nearest_even:
        return []
    return ["global_scale: row works with block row_1x16, rounding nearest_even and no Hadamard transform only"]


def _four_over_six_problems(spec: OperandSpec) -> list[str]:
    if spec.scale_rule is ScaleRule.amax:
        return [] if spec.block_scale_max == 448 else ["block_scale_max: 256 belongs to the four-over-six scale rules"]
    if spec.hadamard_size or spec.rounding is Rounding.stochastic or spec.global_scale is GlobalScale.row:
        return [
            f"scale_rule: {spec.scale_rule} needs rounding nearest_even, global_scale tensor and no Hadamard transform"
        ]
    return []


def _quantizer_problems(spec: OperandSpec) -> list[str]:
    if spec.quantizer is None:
        return [] if spec.args is None else [f"args: found {spec.args} without a quantizer to give them to"]
    if not EXTENSION_PATH.fullmatch(spec.quantizer):
        return [f"quantizer: found {spec.quantizer!r}, expected package.module:function"]
    if not spec.is_quantized:
        return [f"quantizer: needs a low-precision format that says what it is given, found {spec.format}"]
    return []
