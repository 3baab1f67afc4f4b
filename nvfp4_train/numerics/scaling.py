"""Block scales of NVFP4: from maxima of a tensor and its blocks to E4M3 scales and the factors that encode elements.

All arithmetic is fp32 with one rounding per written operation, in the order written: another order moves scales by
one unit in the last place, which flips codes. Constants that are divided sit in 0-dim tensors, because PyTorch
computes `number / tensor` as reciprocal times number, two roundings.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4_train.numerics.formats import BLOCK_LENGTH, E2M1_MAX, decode_e2m1, decode_e4m3, encode_e4m3
from nvfp4_train.numerics.rounding import round_nearest_even
from nvfp4_train.numerics.spec import Block, OperandSpec, ScaleRule

FP32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class GlobalFactors:
    """What the amax of a tensor (0-dim) or of its rows ([R, 1]) says about all its blocks, fp32.

    `encode` maps amax to the largest representable product of code and scale, `decode` is its reciprocal.
    """

    amax: Tensor
    encode: Tensor
    decode: Tensor


def global_factors(amax: Tensor, block_scale_max: int) -> GlobalFactors:
    """Return the global factors for `amax` (fp32, non-negative, possibly inf or NaN)."""
    encode = (_constant(E2M1_MAX * block_scale_max, amax) / amax).clamp(max=FP32_MAX)
    encode = torch.where(encode == 0, 1.0, encode)  # amax is inf
    return GlobalFactors(amax, encode, _constant(1.0, amax) / encode)


def block_amax(x: Tensor, block: Block) -> Tensor:
    """Return the largest magnitude of every block of x [R, C] (fp32, dims multiples of the block) as [R, C/16].

    A 16x16 tile's maximum is repeated over its 16 rows. NaN propagates.
    """
    largest = x.abs().unflatten(-1, (-1, BLOCK_LENGTH)).amax(dim=-1)
    if block is Block.row_1x16:
        return largest
    tiles = largest.unflatten(0, (-1, BLOCK_LENGTH)).amax(dim=1)
    return tiles.repeat_interleave(BLOCK_LENGTH, dim=0)


def block_scales(largest: Tensor, factors: GlobalFactors) -> Tensor:
    """Return E4M3 scale bytes for block maxima: the scale that maps a block's maximum to the code 6."""
    one_sixth = torch.tensor(1.0 / E2M1_MAX, dtype=torch.float32, device=largest.device)
    return encode_e4m3((largest * (factors.encode * one_sixth)).clamp(max=FP32_MAX))


def encode_factors(scales: Tensor, factors: GlobalFactors) -> Tensor:
    """Return what elements are multiplied by before rounding, for scale bytes [R, C/16]; FP32_MAX for a zero scale."""
    return (_constant(1.0, factors.decode) / (decode_e4m3(scales) * factors.decode)).clamp(max=FP32_MAX)


def scale_elements(x: Tensor, encode: Tensor) -> Tensor:
    """Multiply x [R, C] by the encode factors of its blocks [R, C/16] and clamp to what a code can hold."""
    return (x.unflatten(-1, (-1, BLOCK_LENGTH)) * encode.unsqueeze(-1)).flatten(-2).clamp(-E2M1_MAX, E2M1_MAX)


def four_over_six(x: Tensor, largest: Tensor, factors: GlobalFactors, spec: OperandSpec) -> tuple[Tensor, Tensor]:
    """Map each block's maximum to 6 or to 4, whichever reproduces the block better; a tie goes to 6.

    Here the block maximum is divided by 6, while the plain rule multiplies by the rounded reciprocal: both follow their
    published definitions.

    Args:
        x: fp32 [R, C].
        largest: Block maxima [R, C/16].
        factors: Global factors of the tensor.
        spec: Says the error measure and the block shape.

    Returns:
        Unpacked codes uint8 [R, C] and scale bytes uint8 [R, C/16].
    """
    base = (largest / _constant(E2M1_MAX, largest)) * factors.encode
    candidates = []
    for scaled in (base, base * 1.5):
        scales = encode_e4m3(scaled)
        codes = round_nearest_even(scale_elements(x, encode_factors(scales, factors)))
        candidates.append((codes, scales, _block_error(x, codes, scales, factors, spec)))
    (codes_6, scales_6, error_6), (codes_4, scales_4, error_4) = candidates
    use_4 = error_4 < error_6
    codes = torch.where(use_4.repeat_interleave(BLOCK_LENGTH, dim=1), codes_4, codes_6)
    return codes, torch.where(use_4, scales_4, scales_6)


def _block_error(x: Tensor, codes: Tensor, scales: Tensor, factors: GlobalFactors, spec: OperandSpec) -> Tensor:
    """Sum of the errors of every block, [R, C/16], added up in element order."""
    decoded = decode_e2m1(codes).unflatten(-1, (-1, BLOCK_LENGTH)) * decode_e4m3(scales).unsqueeze(-1)
    decoded = (decoded * factors.amax) / _constant(E2M1_MAX * spec.block_scale_max, x)
    difference = decoded - x.unflatten(-1, (-1, BLOCK_LENGTH))
    squared = spec.scale_rule is ScaleRule.four_over_six_mse
    errors = difference * difference if squared else difference.abs()
    total = torch.zeros_like(errors[..., 0])
    for element in range(BLOCK_LENGTH):
        total = total + errors[..., element]
    return total if spec.block is Block.row_1x16 else _tile_error(total)


def _tile_error(row_errors: Tensor) -> Tensor:
    """Add the 16 row sums of each tile as a tree, rows i and i + 8 first."""
    rows = row_errors.unflatten(0, (-1, BLOCK_LENGTH))
    for half in (8, 4, 2, 1):
        rows = rows[:, :half] + rows[:, half : 2 * half]
    return rows.expand(-1, BLOCK_LENGTH, -1).flatten(0, 1)


def _constant(value: float, like: Tensor) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device=like.device)
