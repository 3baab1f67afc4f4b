"""How one GEMM operand is rounded: the cell of a recipe table.

Everything here is data and imports nothing heavy, so that the configuration layer can use it as its schema. Enum
members are named like their values because OmegaConf matches members by name.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Format(StrEnum):
    """Elements of a GEMM operand and the kind of scale that they share."""

    fp32 = "fp32"
    bf16 = "bf16"
    nvfp4 = "nvfp4"  # E2M1 elements, an E4M3 scale per block of 16, an FP32 scale above
    mxfp4 = "mxfp4"  # E2M1 elements, a power of two (E8M0) per block of 32
    mxfp8_e4m3 = "mxfp8_e4m3"  # E4M3 elements, a power of two per block of 32
    mxfp8_e5m2 = "mxfp8_e5m2"
    fp8_e4m3 = "fp8_e4m3"  # E4M3 elements, an FP32 scale per tensor, row or block of 128
    fp8_e5m2 = "fp8_e5m2"


class Block(StrEnum):
    """Which elements share one block scale; the last dim is the GEMM's contraction dim.

    A block that a dim ends in the middle of is completed with zeros.
    """

    none = "none"  # no block scale: fp32, bf16, and fp8 with one scale per tensor or row
    row_1x16 = "row_1x16"
    tile_16x16 = "tile_16x16"
    row_1x32 = "row_1x32"
    tile_32x32 = "tile_32x32"
    row_1x128 = "row_1x128"
    tile_128x128 = "tile_128x128"


class Rounding(StrEnum):
    """How an element is rounded to the grid; scales are always rounded by a fixed rule."""

    nearest_even = "nearest_even"
    stochastic = "stochastic"


class HadamardSigns(StrEnum):
    """Signs put on the elements of a group before the Hadamard transform."""

    none = "none"
    fixed = "fixed"  # the published mask 0xD7E8, repeated, the same for every tensor, layer, step and rank
    per_layer = "per_layer"  # drawn once per run and layer
    per_call = "per_call"  # drawn again for every microbatch


class GlobalScale(StrEnum):
    """Which elements share one FP32 scale above the block scales."""

    none = "none"
    tensor = "tensor"
    row = "row"
    block_128 = "block_128"  # 1x128 elements above rows, 128x128 above tiles


class ScaleRule(StrEnum):
    """How a block's scale is chosen from its elements."""

    amax = "amax"  # map the block maximum to the largest code; a power of two is rounded up, so nothing saturates
    floor = "floor"  # powers of two: the OCP rule, 2^(floor(log2(maximum)) - largest exponent); large elements saturate
    clip_safe = "clip_safe"  # map it to 6 * 16/17, so that an E4M3 scale that is rounded down does not saturate it
    four_over_six_mae = "four_over_six_mae"  # map it to 6 or to 4, whichever has the lower absolute error
    four_over_six_mse = "four_over_six_mse"  # the same with the squared error


class GemmMode(StrEnum):
    """How the emulated GEMM multiplies its operands."""

    auto = "auto"  # bf16_exact where the machine multiplies BF16 fast, fp32_exact elsewhere
    bf16_exact = "bf16_exact"
    fp32_exact = "fp32_exact"
    fp32_blockwise = "fp32_blockwise"  # the reference order: exact sums inside blocks, blocks added up one by one


HIGH_PRECISION_FORMATS = (Format.fp32, Format.bf16)
FOUR_BIT_FORMATS = (Format.nvfp4, Format.mxfp4)
MX_FORMATS = (Format.mxfp4, Format.mxfp8_e4m3, Format.mxfp8_e5m2)
FP8_FORMATS = (Format.fp8_e4m3, Format.fp8_e5m2)
BLOCK_SIZE = {
    Block.row_1x16: 16,
    Block.tile_16x16: 16,
    Block.row_1x32: 32,
    Block.tile_32x32: 32,
    Block.row_1x128: 128,
    Block.tile_128x128: 128,
}
TILES = (Block.tile_16x16, Block.tile_32x32, Block.tile_128x128)
CHUNK = 128  # elements that share an FP32 scale below the level of a row
DIM_MULTIPLE = 16  # what GEMMs in low precision ask of every dim; a longer block is completed with zeros
HADAMARD_SIZES = (2, 4, 8, 16, 32, 64, 128)

_BLOCKS = {
    Format.nvfp4: (Block.row_1x16, Block.tile_16x16),
    **dict.fromkeys(MX_FORMATS, (Block.row_1x32, Block.tile_32x32)),
    **dict.fromkeys(FP8_FORMATS, (Block.none, Block.row_1x128, Block.tile_128x128)),
}
_SCALE_RULES = {
    Format.nvfp4: (
        ScaleRule.amax,
        ScaleRule.clip_safe,
        ScaleRule.four_over_six_mae,
        ScaleRule.four_over_six_mse,
    ),
    **dict.fromkeys(MX_FORMATS, (ScaleRule.amax, ScaleRule.floor)),
    **dict.fromkeys(FP8_FORMATS, (ScaleRule.amax,)),
}

EXTENSION_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")  # package.module:name


@dataclass(kw_only=True, slots=True)
class OperandSpec:
    """How one GEMM operand becomes low precision.

    Args:
        format: Elements and kind of scale.
        block: Elements that share a block scale.
        rounding: Rounding of the elements.
        hadamard_size: Group length of the Hadamard transform along the contraction dim before quantization; 0 is none.
        hadamard_signs: Signs of that transform.
        global_scale: Elements that share the FP32 scale above the block scales, or that of fp8 without blocks.
        scale_rule: How the block scale is chosen.
        block_scale_max: Largest block scale that nvfp4's FP32 scale aims at: 448 (E4M3's maximum) or 256
            (four-over-six).
        amax_history_length: 0 scales by the tensor's own maximum; n scales fp8 by the largest maximum of the last n
            steps, so that no pass over the tensor has to come first (delayed scaling).
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
    amax_history_length: int = 0
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

    @property
    def is_packed(self) -> bool:
        """Whether two elements share a byte."""
        return self.format in FOUR_BIT_FORMATS

    @property
    def is_tile(self) -> bool:
        """Whether a scale covers as many rows as columns."""
        return self.block in TILES

    @property
    def block_size(self) -> int:
        """Elements along the contraction dim that share an 8-bit scale; 0 without such scales."""
        return BLOCK_SIZE[self.block] if self.is_quantized and self.format not in FP8_FORMATS else 0

    @property
    def block_length(self) -> int:
        """Elements along a dim that share a scale of any kind below that of a row or of the tensor; 1 without such."""
        return CHUNK if self.fp32_scale is GlobalScale.block_128 else max(self.block_size, 1)

    @property
    def fp32_scale(self) -> GlobalScale:
        """Which elements share an FP32 scale: the global scale, or the blocks of fp8."""
        is_fp8_block = self.format in FP8_FORMATS and self.block is not Block.none
        return GlobalScale.block_128 if is_fp8_block else self.global_scale

    @property
    def has_amax(self) -> bool:
        """Whether quantizing needs maxima of more than a block first."""
        return self.fp32_scale is not GlobalScale.none

    @property
    def is_direction_free(self) -> bool:
        """Whether the codes of x^T are those of x, transposed, so that one quantization serves two GEMMs."""
        if not self.is_quantized:
            return True
        if self.quantizer is not None:
            return False
        is_square = self.is_tile or (self.block is Block.none and self.global_scale is GlobalScale.tensor)
        return is_square and not self.hadamard_size and self.rounding is Rounding.nearest_even


def _operand_problems(spec: OperandSpec) -> list[str]:
    if not spec.is_quantized:
        return _high_precision_problems(spec)
    problems = []
    if spec.block not in _BLOCKS[spec.format]:
        problems.append(f"block: found {spec.block}, {spec.format} needs one of {', '.join(_BLOCKS[spec.format])}")
    if spec.scale_rule not in _SCALE_RULES[spec.format]:
        allowed = ", ".join(_SCALE_RULES[spec.format])
        problems.append(f"scale_rule: found {spec.scale_rule}, {spec.format} has {allowed}")
    return [
        *problems,
        *_global_scale_problems(spec),
        *_hadamard_problems(spec),
        *_four_over_six_problems(spec),
        *_history_problems(spec),
    ]


def _high_precision_problems(spec: OperandSpec) -> list[str]:
    fixed = {
        "block": (spec.block, Block.none),
        "rounding": (spec.rounding, Rounding.nearest_even),
        "hadamard_size": (spec.hadamard_size, 0),
        "hadamard_signs": (spec.hadamard_signs, HadamardSigns.none),
        "global_scale": (spec.global_scale, GlobalScale.none),
        "scale_rule": (spec.scale_rule, ScaleRule.amax),
        "block_scale_max": (spec.block_scale_max, 448),
        "amax_history_length": (spec.amax_history_length, 0),
    }
    return [
        f"{key}: found {found}, a {spec.format} operand has only {only}"
        for key, (found, only) in fixed.items()
        if found != only
    ]


def _global_scale_problems(spec: OperandSpec) -> list[str]:
    found = spec.global_scale
    if spec.format in MX_FORMATS or spec.fp32_scale is not found:
        what = spec.format if spec.format in MX_FORMATS else f"{spec.format} with block {spec.block}"
        return [] if found is GlobalScale.none else [f"global_scale: found {found}, {what} has none"]
    allowed = [GlobalScale.tensor, GlobalScale.row]
    allowed += [GlobalScale.block_128] if spec.format is Format.nvfp4 else []
    if found not in allowed:
        return [f"global_scale: found {found}, {spec.format} needs {' or '.join(allowed)}"]
    if found is not GlobalScale.row:
        return []
    if not spec.is_tile and spec.hadamard_size == 0 and spec.rounding is Rounding.nearest_even:
        return []
    return ["global_scale: row works with a block along the row, rounding nearest_even and no Hadamard transform only"]


def _hadamard_problems(spec: OperandSpec) -> list[str]:
    if spec.hadamard_size not in (0, *HADAMARD_SIZES):
        sizes = ", ".join(map(str, HADAMARD_SIZES))
        return [f"hadamard_size: found {spec.hadamard_size}, expected 0 (no transform) or one of {sizes}"]
    if spec.hadamard_size == 0 and spec.hadamard_signs is not HadamardSigns.none:
        return [f"hadamard_signs: found {spec.hadamard_signs} without a transform; set hadamard_size or signs: none"]
    return []


def _four_over_six_problems(spec: OperandSpec) -> list[str]:
    if spec.block_scale_max not in (256, 448):
        return [f"block_scale_max: found {spec.block_scale_max}, expected 448 or 256"]
    if spec.scale_rule not in (ScaleRule.four_over_six_mae, ScaleRule.four_over_six_mse):
        return [] if spec.block_scale_max == 448 else ["block_scale_max: 256 belongs to the four-over-six scale rules"]
    is_plain = spec.global_scale is GlobalScale.tensor and spec.rounding is Rounding.nearest_even
    if spec.hadamard_size or not is_plain:
        return [
            f"scale_rule: {spec.scale_rule} needs rounding nearest_even, global_scale tensor and no Hadamard transform"
        ]
    return []


def _history_problems(spec: OperandSpec) -> list[str]:
    if spec.amax_history_length < 0:
        return [f"amax_history_length: found {spec.amax_history_length}, expected 0 (no history) or a number of steps"]
    is_fp8_tensor = spec.format in FP8_FORMATS and spec.fp32_scale is GlobalScale.tensor
    if spec.amax_history_length and not is_fp8_tensor:
        return ["amax_history_length: works with fp8 formats and global_scale tensor only"]
    return []


def _quantizer_problems(spec: OperandSpec) -> list[str]:
    if spec.quantizer is None:
        return [] if spec.args is None else [f"args: found {spec.args} without a quantizer to give them to"]
    if not EXTENSION_PATH.fullmatch(spec.quantizer):
        return [f"quantizer: found {spec.quantizer!r}, expected package.module:function"]
    if not spec.is_quantized:
        return [f"quantizer: needs a low-precision format that says what it is given, found {spec.format}"]
    return []
