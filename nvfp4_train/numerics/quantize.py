"""Quantization of a GEMM operand: amax, codes and scales, and the exact BF16 values that a GEMM multiplies."""

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor
from torch.nn.functional import pad

from nvfp4_train.numerics.formats import BLOCK_LENGTH, E2M1_MAX, decode_e2m1, decode_e4m3, pack_codes, unpack_codes
from nvfp4_train.numerics.hadamard import check_transform_length, hadamard_transform
from nvfp4_train.numerics.kernels import is_compiled, native
from nvfp4_train.numerics.random import RandomStream, random_bytes
from nvfp4_train.numerics.rounding import round_nearest_even, round_stochastic
from nvfp4_train.numerics.scaling import (
    block_amax,
    block_scales,
    encode_factors,
    four_over_six,
    global_factors,
    scale_elements,
)
from nvfp4_train.numerics.spec import Block, Format, GlobalScale, OperandSpec, Rounding, ScaleRule

INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Direction(StrEnum):
    """Which dim of x [M, N] is the contraction dim, along which blocks lie."""

    row = "row"  # N: the quantized matrix is x
    column = "column"  # M: the quantized matrix is x^T, quantized from x and not repacked


@dataclass(frozen=True)
class QuantizedTensor:
    """A quantized matrix of logical shape [R, C]; R, C are those of x^T where the direction was `column`.

    Args:
        codes: Packed E2M1 codes, uint8 [R, C/2], even column in the low nibble.
        block_scale: E4M3 bytes, uint8 [R, C/16], rounded up to whole blocks (a tile also rounds R up).
        amax: fp32 [1], or [R] with one global scale per row.
        spec: How it was quantized.
        shape: (R, C).
        dtype: What the input was.
    """

    codes: Tensor
    block_scale: Tensor
    amax: Tensor
    spec: OperandSpec
    shape: tuple[int, int]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Memory that the codes, the scales and the amax take."""
        return sum(part.numel() * part.element_size() for part in (self.codes, self.block_scale, self.amax))


@dataclass(frozen=True)
class GemmOperand:
    """What a GEMM multiplies: `values` [R, C] with the contraction dim last, still to be scaled by what `amax` says.

    For a quantized operand the values are code * block_scale, which BF16 holds exactly, and amax is fp32 [1] or [R].
    For an operand in high precision amax is None and the values are the operand.
    """

    values: Tensor
    amax: Tensor | None
    spec: OperandSpec

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.values.device

    @property
    def shape(self) -> torch.Size:
        """(R, K)."""
        return self.values.shape

    def transposed(self) -> "GemmOperand":
        """Return the operand of the transposed matrix without quantizing again (a view).

        A weight with 16x16 tiles is quantized once and used in this way for dgrad: its codes do not depend on the
        direction.

        Raises:
            ValueError: for blocks or global scales that lie along one dim; quantize in the other direction instead.
        """
        if self.spec.block is Block.row_1x16 or self.spec.hadamard_size:
            raise ValueError(
                f"block: found {self.spec.block}, which lies along one dim; quantize in direction column instead"
            )
        return GemmOperand(self.values.t(), self.amax, self.spec)


def compute_amax(x: Tensor, spec: OperandSpec, *, direction: Direction) -> Tensor:
    """Return the largest magnitude of what `quantize` would round, fp32.

    A step of its own, so that ranks can agree on it before they quantize.

    Args:
        x: bf16, fp16 or fp32 [..., N]; leading dims are flattened.
        spec: The operand's format; with a Hadamard transform, the maximum is that of the transformed values.
        direction: Which dim is contracted.

    Returns:
        [1], or with one global scale per row [R]. NaN if there is one.

    Raises:
        ValueError: for a spec that does not quantize, an unknown dtype, or a transform over a dim that 16 does not
        divide.
    """
    x = _as_matrix(x, spec, direction)
    if is_compiled(x):
        return native.amax_op(x, _settings(spec, direction, None))
    matrix = transformed_matrix(x, spec, direction)
    if spec.global_scale is GlobalScale.row:
        return matrix.abs().amax(dim=1)
    if matrix.numel() == 0:
        return matrix.new_zeros(1)
    return matrix.abs().amax().reshape(1)


def quantize(
    x: Tensor,
    spec: OperandSpec,
    *,
    direction: Direction,
    amax: Tensor | None = None,
    stream: RandomStream | None = None,
) -> QuantizedTensor:
    """Quantize x to packed codes and block scales.

    Rows and columns that do not fill a block are padded with zeros; the codes are cropped to the shape, the scales
    are not.

    Args:
        x: bf16, fp16 or fp32 [..., N]; leading dims are flattened.
        spec: The operand's format.
        direction: Which dim is contracted.
        amax: fp32 [1] or [R] to scale by, if it is not this tensor's own.
        stream: Random bytes for stochastic rounding, addressed by row and column of the quantized matrix.

    Returns:
        The quantized matrix, [M, N] or for `column` [N, M]. A NaN makes every scale that depends on it NaN.

    Raises:
        ValueError: as `compute_amax`; stochastic rounding without a stream; an odd number of columns.
    """
    x = _as_matrix(x, spec, direction)
    stream = _checked_stream(spec, stream)
    rows, columns = x.shape if direction is Direction.row else x.shape[::-1]
    amax = compute_amax(x, spec, direction=direction) if amax is None else _checked_amax(amax, spec, rows)
    if is_compiled(x):
        codes, scales = native.quantize_op(x, amax, _settings(spec, direction, stream))
    else:
        unpacked, scales = _quantize_matrix(transformed_matrix(x, spec, direction), spec, amax, stream)
        codes = pack_codes(unpacked[:rows, :columns])
    return QuantizedTensor(codes, scales, amax, spec, (rows, columns), x.dtype)


def quantize_operand(
    x: Tensor,
    spec: OperandSpec,
    *,
    direction: Direction,
    amax: Tensor | None = None,
    stream: RandomStream | None = None,
) -> GemmOperand:
    """Round x to what a GEMM multiplies, without packing: bitwise equal to `gemm_operand(quantize(...))`.

    Arguments and errors are those of `quantize`. A spec in high precision casts x to its format instead (for `column` a
    transposed view), so that every recipe's operands go through this function.
    """
    if not spec.is_quantized:
        values = x.flatten(0, -2).to(torch.bfloat16 if spec.format is Format.bf16 else torch.float32)
        return GemmOperand(values if direction is Direction.row else values.t(), None, spec)
    x = _as_matrix(x, spec, direction)
    stream = _checked_stream(spec, stream)
    rows, columns = x.shape if direction is Direction.row else x.shape[::-1]
    amax = compute_amax(x, spec, direction=direction) if amax is None else _checked_amax(amax, spec, rows)
    if is_compiled(x):
        return GemmOperand(native.quantize_operand_op(x, amax, _settings(spec, direction, stream)), amax, spec)
    codes, scales = _quantize_matrix(transformed_matrix(x, spec, direction), spec, amax, stream)
    return GemmOperand(_scaled_codes(codes, scales)[:rows, :columns].to(torch.bfloat16).contiguous(), amax, spec)


def gemm_operand(quantized: QuantizedTensor) -> GemmOperand:
    """Unpack to what a GEMM multiplies: bf16 [R, C] = code * block_scale, exact, without the global scale."""
    if is_compiled(quantized.codes):
        values = native.operand_op(quantized.codes, quantized.block_scale)
    else:
        values = _scaled_codes(*_padded_codes(quantized)).to(torch.bfloat16)[:, : quantized.shape[1]].contiguous()
    return GemmOperand(values, quantized.amax, quantized.spec)


def dequantize(quantized: QuantizedTensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values [R, C] that the codes stand for: code * ((scale * amax) * (1 / (6 * block_scale_max))) in fp32.

    With a Hadamard transform the result is in the transformed domain. The product scale * amax overflows for an amax
    beyond about 7.6e35, as it does in the kernels that this formula follows.
    """
    if is_compiled(quantized.codes):
        spec = quantized.spec
        return native.dequantize(quantized.codes, quantized.block_scale, quantized.amax, spec.block_scale_max).to(dtype)
    codes, scales = _padded_codes(quantized)
    largest_product = E2M1_MAX * quantized.spec.block_scale_max
    inverse = torch.tensor(1.0 / largest_product, dtype=torch.float32, device=codes.device)
    amax = quantized.amax.unsqueeze(1)  # [1, 1] or [R, 1]
    factors = (decode_e4m3(scales) * amax) * inverse
    values = decode_e2m1(codes).unflatten(-1, (-1, BLOCK_LENGTH)) * factors.unsqueeze(-1)
    return values.flatten(-2)[:, : quantized.shape[1]].to(dtype)


def _as_matrix(x: Tensor, spec: OperandSpec, direction: Direction) -> Tensor:
    if not spec.is_quantized:
        raise ValueError(f"format: found {spec.format}, which has no codes; quantize_operand casts it")
    if x.dtype not in INPUT_DTYPES or x.dim() < 2:
        raise ValueError(f"expected a bf16, fp16 or fp32 tensor of at least 2 dims, found {x.dtype} {tuple(x.shape)}")
    matrix = x.flatten(0, -2)
    contracted = matrix.shape[1 if direction is Direction.row else 0]
    if contracted % 2:
        raise ValueError(f"quantizing along a dim of {contracted} elements: two codes share a byte, so it must be even")
    if spec.hadamard_size:
        check_transform_length(contracted)
    return matrix


def _checked_stream(spec: OperandSpec, stream: RandomStream | None) -> RandomStream | None:
    if spec.rounding is Rounding.nearest_even:
        return None
    if stream is None:
        raise ValueError("stochastic rounding needs a stream of random bytes, found None")
    return stream


def _checked_amax(amax: Tensor, spec: OperandSpec, rows: int) -> Tensor:
    expected = rows if spec.global_scale is GlobalScale.row else 1
    if amax.dtype is not torch.float32 or amax.shape != (expected,):
        raise ValueError(f"amax: expected fp32 [{expected}], found {amax.dtype} {list(amax.shape)}")
    return amax


def _settings(spec: OperandSpec, direction: Direction, stream: RandomStream | None) -> list[int]:
    column = direction is Direction.column
    if stream is None:
        return native.settings_of(spec, column=column)
    offsets = {"row_offset": stream.row_offset, "column_offset": stream.column_offset}
    return native.settings_of(spec, column=column, key=stream.key, **offsets)


def transformed_matrix(x: Tensor, spec: OperandSpec, direction: Direction) -> Tensor:
    """The matrix to quantize, fp32 [R, C]: x or x^T, after the Hadamard transform."""
    matrix = x if direction is Direction.row else x.t()
    if spec.hadamard_size:
        matrix = hadamard_transform(matrix, spec.hadamard_signs)
    return matrix.to(torch.float32)


def _quantize_matrix(
    matrix: Tensor, spec: OperandSpec, amax: Tensor, stream: RandomStream | None
) -> tuple[Tensor, Tensor]:
    """Unpacked codes and scale bytes of fp32 [R, C], both padded to whole blocks."""
    row_padding = -matrix.shape[0] % BLOCK_LENGTH if spec.block is Block.tile_16x16 else 0
    matrix = pad(matrix, (0, -matrix.shape[1] % BLOCK_LENGTH, 0, row_padding))
    factors = global_factors(amax.unsqueeze(1), spec.block_scale_max)  # [1, 1] or [R, 1]
    largest = block_amax(matrix, spec.block)
    if spec.scale_rule is not ScaleRule.amax:
        return four_over_six(matrix, largest, factors, spec)
    scales = block_scales(largest, factors)
    scaled = scale_elements(matrix, encode_factors(scales, factors))
    if stream is None:
        return round_nearest_even(scaled), scales
    return round_stochastic(scaled, random_bytes(stream, *scaled.shape, device=scaled.device)), scales


def _padded_codes(quantized: QuantizedTensor) -> tuple[Tensor, Tensor]:
    """Unpacked codes, padded to whole blocks along the row, and the scales of the real rows."""
    codes = pad(unpack_codes(quantized.codes), (0, -quantized.shape[1] % BLOCK_LENGTH))
    return codes, quantized.block_scale[: quantized.shape[0]]


def _scaled_codes(codes: Tensor, scales: Tensor) -> Tensor:
    blocks = decode_e2m1(codes).unflatten(-1, (-1, BLOCK_LENGTH))
    return (blocks * decode_e4m3(scales).unsqueeze(-1)).flatten(-2)
