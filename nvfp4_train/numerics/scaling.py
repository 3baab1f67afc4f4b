"""Scales: from maxima of a tensor and its blocks to the factors that encode and decode elements.

All arithmetic is fp32 with one rounding per written operation, in the order written: another order moves scales by
one unit in the last place, which flips codes. Constants that are divided sit in 0-dim tensors, because PyTorch
computes `number / tensor` as reciprocal times number, two roundings.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from nvfp4_train.numerics.formats import (
    BLOCK_LENGTH,
    E2M1_MAX,
    ELEMENT,
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    encode_e4m3,
    encode_e8m0,
)
from nvfp4_train.numerics.rounding import round_nearest_even
from nvfp4_train.numerics.spec import (
    CHUNK,
    Format,
    GlobalScale,
    OperandSpec,
    ScaleRule,
)

FP32_MAX = torch.finfo(torch.float32).max
CLIP_SAFE_MAX = E2M1_MAX * 16 / 17  # E4M3 rounds a scale down by at most 16/17


@dataclass(frozen=True)
class GlobalFactors:
    """What the amax of a tensor (0-dim), of its rows ([R, 1]) or of chunks ([R, C/16]) says about all its blocks, fp32.

    `encode` maps amax to the largest representable product of code and scale, `decode` is its reciprocal.
    """

    amax: Tensor
    encode: Tensor
    decode: Tensor


def largest_product(spec: OperandSpec) -> float:
    """Return what an operand's amax is mapped to: the largest element, in nvfp4 times the largest block scale."""
    if spec.format is Format.nvfp4:
        return E2M1_MAX * spec.block_scale_max
    return ELEMENT[spec.format].largest


def safe_amax(amax: Tensor, spec: OperandSpec) -> Tensor:
    """Return amax, but not below what the largest fp32 factor maps to the largest product.

    So encoding and decoding are inverse down to subnormal tensors. An nvfp4 tensor or row keeps the published rule,
    which decodes maxima below 7.9e-36 too small.
    """
    if spec.format is Format.nvfp4 and spec.global_scale is not GlobalScale.block_128:
        return amax
    return amax.clamp(min=largest_product(spec) / FP32_MAX)


def global_factors(amax: Tensor, largest: float) -> GlobalFactors:
    """Return the factors that map `amax` (fp32, non-negative, possibly inf or NaN) to `largest`."""
    encode = (_constant(largest, amax) / amax).clamp(max=FP32_MAX)
    encode = torch.where(encode == 0, 1.0, encode)  # amax is inf
    return GlobalFactors(amax, encode, _constant(1.0, amax) / encode)


def decode_chunks(amax: Tensor, spec: OperandSpec) -> Tensor:
    """Return what values of chunks of 128 are multiplied by after a GEMM, fp32 like amax: amax / largest product."""
    return safe_amax(amax, spec) / _constant(largest_product(spec), amax)


def block_amax(x: Tensor, width: int, *, is_tile: bool) -> Tensor:
    """Return the largest magnitude of every block of x [R, C] (fp32, dims multiples of the block) as [R, C/width].

    A tile's maximum is repeated over its rows. NaN propagates.
    """
    largest = x.abs().unflatten(-1, (-1, width)).amax(dim=-1)
    if not is_tile:
        return largest
    tiles = largest.unflatten(0, (-1, width)).amax(dim=1)
    return tiles.repeat_interleave(width, dim=0)


def chunk_amax(x: Tensor, spec: OperandSpec) -> Tensor:
    """Return the largest magnitude of every chunk of 128 of x [R, C] (fp32), as [R, C/128] rounded up."""
    padding = -x.shape[0] % CHUNK if spec.is_tile else 0
    return block_amax(pad(x, (0, -x.shape[1] % CHUNK, 0, padding)), CHUNK, is_tile=spec.is_tile)[: x.shape[0]]


def spread_amax(amax: Tensor, spec: OperandSpec, *, rows: int, num_blocks: int) -> Tensor:
    """Return amax [1], [R] or [R, C/128] in a shape that broadcasts over the blocks [rows, num_blocks] of a matrix.

    Rows that fill up tiles lie in the tile of the last one.
    """
    if spec.fp32_scale is not GlobalScale.block_128:
        return amax.unsqueeze(1)  # [1, 1] or [R, 1]
    repeated = amax.repeat_interleave(CHUNK // (spec.block_size or CHUNK), dim=1)[:, :num_blocks]
    return torch.cat([repeated, repeated[-1:].expand(rows - amax.shape[0], -1)])


def block_scales(largest: Tensor, factors: GlobalFactors | None, spec: OperandSpec) -> Tensor:
    """Return scale bytes for block maxima: E4M3 for nvfp4, which needs the global factors, else E8M0."""
    if factors is None:
        return encode_e8m0(largest, ELEMENT[spec.format], round_up=spec.scale_rule is ScaleRule.amax)
    target = CLIP_SAFE_MAX if spec.scale_rule is ScaleRule.clip_safe else E2M1_MAX
    return encode_e4m3((largest * (factors.encode * _constant(1.0 / target, largest))).clamp(max=FP32_MAX))


def decode_scales(scales: Tensor, spec: OperandSpec) -> Tensor:
    """Return the fp32 values of scale bytes; exact."""
    return decode_e4m3(scales) if spec.format is Format.nvfp4 else decode_e8m0(scales)


def encode_factors(scales: Tensor, factors: GlobalFactors | None, spec: OperandSpec) -> Tensor:
    """Return what elements are multiplied by before rounding, for scale bytes; FP32_MAX for a zero scale.

    The reciprocal of a power of two is exact: block maxima below infinity give scales up to 2^126.
    """
    decoded = decode_scales(scales, spec)
    decoded = decoded if factors is None else decoded * factors.decode
    return (_constant(1.0, decoded) / decoded).clamp(max=FP32_MAX)


def scale_elements(x: Tensor, encode: Tensor, *, width: int) -> Tensor:
    """Multiply x [R, C] by the encode factors of its blocks [R, C/width] (or what broadcasts to them)."""
    return (x.unflatten(-1, (-1, width)) * encode.unsqueeze(-1)).flatten(-2)


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
        codes = round_nearest_even(scale_elements(x, encode_factors(scales, factors, spec), width=BLOCK_LENGTH))
        candidates.append((codes, scales, _block_error(x, codes, scales, factors, spec)))
    (codes_6, scales_6, error_6), (codes_4, scales_4, error_4) = candidates
    use_4 = error_4 < error_6
    codes = torch.where(use_4.repeat_interleave(BLOCK_LENGTH, dim=1), codes_4, codes_6)
    return codes, torch.where(use_4, scales_4, scales_6)


def _block_error(x: Tensor, codes: Tensor, scales: Tensor, factors: GlobalFactors, spec: OperandSpec) -> Tensor:
    """Sum of the errors of every block, [R, C/16], added up in element order."""
    decoded = decode_e2m1(codes).unflatten(-1, (-1, BLOCK_LENGTH)) * decode_e4m3(scales).unsqueeze(-1)
    decoded = (decoded * factors.amax.unsqueeze(-1)) / _constant(largest_product(spec), x)
    difference = decoded - x.unflatten(-1, (-1, BLOCK_LENGTH))
    squared = spec.scale_rule is ScaleRule.four_over_six_mse
    errors = difference * difference if squared else difference.abs()
    total = torch.zeros_like(errors[..., 0])
    for element in range(BLOCK_LENGTH):
        total = total + errors[..., element]
    return _tile_error(total) if spec.is_tile else total


def _tile_error(row_errors: Tensor) -> Tensor:
    """Add the 16 row sums of each tile as a tree, rows i and i + 8 first."""
    rows = row_errors.unflatten(0, (-1, BLOCK_LENGTH))
    for half in (8, 4, 2, 1):
        rows = rows[:, :half] + rows[:, half : 2 * half]
    return rows.expand(-1, BLOCK_LENGTH, -1).flatten(0, 1)


def _constant(value: float, like: Tensor) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device=like.device)
