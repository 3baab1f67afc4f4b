"""Quantization of a GEMM operand: amax, codes and scales, and the exact BF16 values that a GEMM multiplies."""

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor
from torch.nn.functional import pad

from nvfp4_train.numerics.formats import ELEMENT, decode_codes, pack_codes, unpack_codes
from nvfp4_train.numerics.hadamard import check_transform_length, hadamard_transform, transform_mask
from nvfp4_train.numerics.inductor import compiled, uses_inductor
from nvfp4_train.numerics.kernels import is_compiled, native
from nvfp4_train.numerics.random import RandomStream, TensorStream, random_bytes
from nvfp4_train.numerics.rounding import round_nearest_even, round_stochastic
from nvfp4_train.numerics.scaling import (
    block_amax,
    block_scales,
    chunk_amax,
    decode_chunks,
    decode_scales,
    encode_factors,
    four_over_six,
    global_factors,
    largest_product,
    safe_amax,
    scale_elements,
    spread_amax,
)
from nvfp4_train.numerics.spec import CHUNK, Format, GlobalScale, OperandSpec, Rounding, ScaleRule

INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Direction(StrEnum):
    """Which dim of x [M, N] is the contraction dim, along which blocks lie."""

    row = "row"  # N: the quantized matrix is x
    column = "column"  # M: the quantized matrix is x^T, quantized from x and not repacked


@dataclass(frozen=True)
class QuantizedTensor:
    """A quantized matrix of logical shape [R, C]; R, C are those of x^T where the direction was `column`.

    Args:
        codes: uint8: packed E2M1 codes [R, C/2], even column in the low nibble; or 8-bit codes [R, C].
        block_scale: Bytes of the block scales, uint8 [R, C/block], rounded up to whole blocks (a tile also rounds R
            up): E4M3 for nvfp4, E8M0 for the mx formats, [R, 0] for fp8.
        amax: fp32: [1]; [R] with one FP32 scale per row; [R, C/128] (rounded up) with one per 128 elements; [0] for the
            mx formats, which have none.
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

    For a quantized operand the values are code * block_scale, in BF16, and amax is that of `QuantizedTensor`. The
    values are exact:
    an E2M1 code times an E4M3 scale has 6 significant bits, and lies in [2^-10, 2688];
    an 8-bit code alone (fp8) has 4, and lies in [2^-9, 448] or [2^-16, 57344];
    a code times a power of two (mx) has 2 to 4, but all of FP32's range, see `exact_gemm` for its ends.
    For an operand in high precision amax is None and the values are the operand.
    """

    values: Tensor
    amax: Tensor | None
    spec: OperandSpec

    @property
    def shape(self) -> tuple[int, int]:
        """(R, C)."""
        return (self.values.shape[0], self.values.shape[1])

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.values.device

    def transposed(self) -> "GemmOperand":
        """Return the operand of the transposed matrix without quantizing again (a view).

        A weight in tiles is quantized once and used in this way for dgrad: its codes do not depend on the direction.

        Raises:
            ValueError: for blocks or global scales that lie along one dim; quantize in the other direction instead.
        """
        if not self.spec.is_direction_free:
            raise ValueError(
                f"block: found {self.spec.block}, which lies along one dim; quantize in direction column instead"
            )
        return GemmOperand(self.values.t(), self._transposed_amax(), self.spec)

    def _transposed_amax(self) -> Tensor | None:
        """[R, C/128] to [C, R/128], both rounded up: one number per tile, repeated over the tile's rows."""
        if self.amax is None or self.spec.fp32_scale is not GlobalScale.block_128:
            return self.amax
        tiles = self.amax[::CHUNK].t()
        return tiles.repeat_interleave(CHUNK, dim=0)[: self.values.shape[1]]


def compute_amax(x: Tensor, spec: OperandSpec, *, direction: Direction, sign_mask: int | None = None) -> Tensor:
    """Return the largest magnitudes that the FP32 scales of `quantize` depend on, fp32.

    A step of its own, so that ranks can agree on it before they quantize.

    Args:
        x: bf16, fp16 or fp32 [..., N]; leading dims are flattened.
        spec: The operand's format; with a Hadamard transform, the maximum is that of the transformed values.
        direction: Which dim is contracted.
        sign_mask: Drawn signs of the transform, from `drawn_sign_mask`.

    Returns:
        [1]; with one FP32 scale per row [R]; with one per 128 elements [R, C/128], rounded up; without any [0]. NaN
        where there is one.

    Raises:
        ValueError: for a spec that does not quantize, an unknown dtype, a transform over a dim that its groups do not
        fill, or drawn signs that are missing.
    """
    x = _as_matrix(x, spec, direction)
    if not spec.has_amax:
        return x.new_empty(0, dtype=torch.float32)
    if is_compiled(x):
        return native.amax_op(x, kernel_settings(spec, direction, sign_mask=sign_mask))
    matrix = transformed_matrix(x, spec, direction, sign_mask)
    match spec.fp32_scale:
        case GlobalScale.block_128:
            return chunk_amax(matrix, spec)
        case GlobalScale.row:
            return matrix.abs().amax(dim=1)
        case _:
            return matrix.abs().amax().reshape(1) if matrix.numel() else matrix.new_zeros(1)


def quantize(
    x: Tensor,
    spec: OperandSpec,
    *,
    direction: Direction,
    amax: Tensor | None = None,
    stream: RandomStream | None = None,
    sign_mask: int | None = None,
) -> QuantizedTensor:
    """Quantize x to codes and block scales.

    Rows and columns that do not fill a block are padded with zeros; the codes are cropped to the shape, the scales
    are not.

    Args:
        x: bf16, fp16 or fp32 [..., N]; leading dims are flattened.
        spec: The operand's format.
        direction: Which dim is contracted.
        amax: fp32, of the shape that `compute_amax` gives, to scale by if it is not this tensor's own. With an older
            one, elements that are too large saturate.
        stream: Random bytes for stochastic rounding, addressed by row and column of the quantized matrix.
        sign_mask: Drawn signs of the Hadamard transform, from `drawn_sign_mask`.

    Returns:
        The quantized matrix, [M, N] or for `column` [N, M]. A NaN makes every scale that depends on it NaN.

    Raises:
        ValueError: as `compute_amax`; stochastic rounding without a stream; an odd number of 4-bit columns.
    """
    x = _as_matrix(x, spec, direction)
    stream = _checked_stream(spec, stream)
    rows, columns = x.shape if direction is Direction.row else x.shape[::-1]
    if amax is None:
        amax = compute_amax(x, spec, direction=direction, sign_mask=sign_mask)
    amax = _checked_amax(amax, spec, rows, columns)
    if is_compiled(x):
        codes, scales = native.quantize_op(
            x, amax, kernel_settings(spec, direction, stream=stream, sign_mask=sign_mask)
        )
    else:
        matrix = transformed_matrix(x, spec, direction, sign_mask)
        unpacked, scales = _quantized_matrix(matrix, spec, amax, stream)
        codes = unpacked[:rows, :columns]
        codes = pack_codes(codes) if spec.is_packed else codes.contiguous()
    return QuantizedTensor(codes, scales, amax, spec, (rows, columns), x.dtype)


def quantize_operand(
    x: Tensor,
    spec: OperandSpec,
    *,
    direction: Direction,
    amax: Tensor | None = None,
    stream: RandomStream | None = None,
    sign_mask: int | None = None,
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
    if amax is None:
        amax = compute_amax(x, spec, direction=direction, sign_mask=sign_mask)
    amax = _checked_amax(amax, spec, rows, columns)
    if is_compiled(x):
        settings = kernel_settings(spec, direction, stream=stream, sign_mask=sign_mask)
        return GemmOperand(native.quantize_operand_op(x, amax, settings), amax, spec)
    codes, scales = _quantized_matrix(transformed_matrix(x, spec, direction, sign_mask), spec, amax, stream)
    values = _scaled_codes(codes, scales, spec)[:rows, :columns]
    return GemmOperand(values.to(torch.bfloat16).contiguous(), amax, spec)


def gemm_operand(quantized: QuantizedTensor) -> GemmOperand:
    """Unpack to what a GEMM multiplies: bf16 [R, C] = code * block_scale, exact, without the FP32 scale."""
    spec = quantized.spec
    if is_compiled(quantized.codes):
        values = native.operand_op(quantized.codes, quantized.block_scale, native.settings_of(spec, column=False))
    else:
        scaled = _scaled_codes(*_padded_codes(quantized), spec)
        values = scaled[:, : quantized.shape[1]].to(torch.bfloat16).contiguous()
    return GemmOperand(values, quantized.amax, spec)


def dequantize(quantized: QuantizedTensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values [R, C] that the codes stand for, computed in fp32.

    nvfp4 with one FP32 scale per tensor or row: code * ((scale * amax) * (1 / (6 * block_scale_max))); the product
    scale * amax overflows for an amax beyond about 7.6e35, as it does in the kernels that this formula follows. Other
    formats: (code * scale) * (amax / largest product).
    With a Hadamard transform the result is in the transformed domain.
    """
    spec, amax = quantized.spec, quantized.amax
    if spec.format is Format.nvfp4 and spec.global_scale is not GlobalScale.block_128:
        return _dequantize_nvfp4(quantized).to(dtype)
    values = _scaled_codes(*_padded_codes(quantized), spec)[:, : quantized.shape[1]]
    if spec.has_amax:
        decode = decode_chunks(amax, spec)
        if spec.fp32_scale is GlobalScale.block_128:
            decode = decode.repeat_interleave(CHUNK, dim=1)[:, : quantized.shape[1]]
        values = values * (decode if decode.dim() == 2 else decode.unsqueeze(1))
    return values.to(dtype)


def _dequantize_nvfp4(quantized: QuantizedTensor) -> Tensor:
    spec = quantized.spec
    if is_compiled(quantized.codes):
        return native.dequantize(quantized.codes, quantized.block_scale, quantized.amax, spec.block_scale_max)
    codes, scales = _padded_codes(quantized)
    inverse = torch.tensor(1.0 / largest_product(spec), dtype=torch.float32, device=codes.device)
    factors = (decode_scales(scales, spec) * quantized.amax.unsqueeze(1)) * inverse  # amax [1, 1] or [R, 1]
    values = scale_elements(decode_codes(codes, ELEMENT[spec.format]), factors, width=spec.block_size)
    return values[:, : quantized.shape[1]]


def _as_matrix(x: Tensor, spec: OperandSpec, direction: Direction) -> Tensor:
    if not spec.is_quantized:
        raise ValueError(f"format: found {spec.format}, which has no codes; quantize_operand casts it")
    if x.dtype not in INPUT_DTYPES or x.dim() < 2:
        raise ValueError(f"expected a bf16, fp16 or fp32 tensor of at least 2 dims, found {x.dtype} {tuple(x.shape)}")
    matrix = x.flatten(0, -2)
    contracted = matrix.shape[1 if direction is Direction.row else 0]
    if spec.is_packed and contracted % 2:
        raise ValueError(f"quantizing along a dim of {contracted} elements: two codes share a byte, so it must be even")
    if spec.hadamard_size:
        check_transform_length(contracted, spec.hadamard_size)
    return matrix


def _checked_stream(spec: OperandSpec, stream: RandomStream | None) -> RandomStream | None:
    if spec.rounding is Rounding.nearest_even:
        return None
    if stream is None:
        raise ValueError("stochastic rounding needs a stream of random bytes, found None")
    return stream


def _checked_amax(amax: Tensor, spec: OperandSpec, rows: int, columns: int) -> Tensor:
    expected = {
        GlobalScale.none: (0,),
        GlobalScale.tensor: (1,),
        GlobalScale.row: (rows,),
        GlobalScale.block_128: (rows, -(-columns // CHUNK)),
    }[spec.fp32_scale]
    if amax.dtype is not torch.float32 or amax.shape != expected:
        raise ValueError(f"amax: expected fp32 {list(expected)}, found {amax.dtype} {list(amax.shape)}")
    return amax


def kernel_settings(
    spec: OperandSpec, direction: Direction, *, stream: RandomStream | None = None, sign_mask: int | None = None
) -> list[int]:
    """What a kernel is told about one quantization."""
    signs = transform_mask(spec, sign_mask)
    return native.settings_of(spec, column=direction is Direction.column, sign_mask=signs, stream=stream)


def transformed_matrix(x: Tensor, spec: OperandSpec, direction: Direction, sign_mask: int | None = None) -> Tensor:
    """The matrix to quantize, fp32 [R, C]: x or x^T, after the Hadamard transform."""
    matrix = x if direction is Direction.row else x.t()
    if spec.hadamard_size:
        mask = transform_mask(spec, sign_mask)
        matrix = hadamard_transform(matrix, size=spec.hadamard_size, sign_mask=mask)
    return matrix.to(torch.float32)


def _quantized_matrix(
    matrix: Tensor, spec: OperandSpec, amax: Tensor, stream: RandomStream | None
) -> tuple[Tensor, Tensor]:
    if not uses_inductor(matrix):
        return quantize_matrix(matrix, spec, amax, stream)
    on_device = None if stream is None else TensorStream.of(stream, device=matrix.device)
    codes, scales = compiled(keyed_quantize_matrix)(matrix, spec, amax, on_device, key=repr(spec))
    return codes, scales


def keyed_quantize_matrix(
    matrix: Tensor, spec: OperandSpec, amax: Tensor, stream: TensorStream | None, *, key: str
) -> tuple[Tensor, Tensor]:
    """`quantize_matrix` for a compiler, which takes code made for one spec for another unless it reads the key."""
    assert key != "", "a key says what the spec is"
    return quantize_matrix(matrix, spec, amax, stream)


def quantize_matrix(
    matrix: Tensor, spec: OperandSpec, amax: Tensor, stream: RandomStream | TensorStream | None
) -> tuple[Tensor, Tensor]:
    """Unpacked codes and scale bytes of fp32 [R, C], both padded to whole blocks."""
    rows, width = matrix.shape[0], spec.block_size or CHUNK
    row_padding = -rows % width if spec.is_tile and spec.block_size else 0
    matrix = pad(matrix, (0, -matrix.shape[1] % width, 0, row_padding))
    num_blocks = matrix.shape[1] // width
    factors = None
    if spec.has_amax:
        spread = spread_amax(safe_amax(amax, spec), spec, rows=matrix.shape[0], num_blocks=num_blocks)
        factors = global_factors(spread, largest_product(spec))
    if spec.block_size == 0:
        assert factors is not None  # fp8 has FP32 scales only
        scales, encode = matrix.new_empty(rows, 0, dtype=torch.uint8), factors.encode
    else:
        largest = block_amax(matrix, width, is_tile=spec.is_tile)
        if factors is not None and spec.scale_rule in (ScaleRule.four_over_six_mae, ScaleRule.four_over_six_mse):
            return four_over_six(matrix, largest, factors, spec)
        scales = block_scales(largest, factors, spec)
        encode = encode_factors(scales, factors, spec)
    scaled = scale_elements(matrix, encode, width=width)
    element = ELEMENT[spec.format]
    if stream is None:
        return round_nearest_even(scaled, element), scales
    return round_stochastic(scaled, random_bytes(stream, *scaled.shape, device=scaled.device), element), scales


def _padded_codes(quantized: QuantizedTensor) -> tuple[Tensor, Tensor]:
    """Unpacked codes, padded to whole blocks along the row, and the scales of the real rows."""
    codes = unpack_codes(quantized.codes) if quantized.spec.is_packed else quantized.codes
    codes = pad(codes, (0, -quantized.shape[1] % (quantized.spec.block_size or 1)))
    return codes, quantized.block_scale[: quantized.shape[0]]


def _scaled_codes(codes: Tensor, scales: Tensor, spec: OperandSpec) -> Tensor:
    values = decode_codes(codes, ELEMENT[spec.format])
    if spec.block_size == 0:
        return values
    return scale_elements(values, decode_scales(scales, spec), width=spec.block_size)
