"""The CPU's GEMM: against float64, against its own other blockings and thread counts, on every kind of operand."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nvfp4_train.numerics.blockwise import sum_blocks
from nvfp4_train.numerics.gemm import PackedOperand, exact_gemm, global_alpha, reads_packed
from nvfp4_train.numerics.kernels import gemm as kernel
from nvfp4_train.numerics.kernels import use
from nvfp4_train.numerics.quantize import Direction, GemmOperand, QuantizedTensor, quantize, quantize_operand
from nvfp4_train.numerics.scaling import largest_product
from nvfp4_train.numerics.spec import (
    FP8_FORMATS,
    MX_FORMATS,
    Block,
    Format,
    GemmMode,
    GlobalScale,
    OperandSpec,
    Rounding,
)
from tests.support.tensors import filled, format_spec, operand_spec, same_bits

ONE = torch.ones(())
BF16 = OperandSpec(format=Format.bf16, block=Block.none, rounding=Rounding.nearest_even)
# Around every border: tiles of 12 x 32, strips of 16 rows, 128 codes, 384 elements of k between visits of the sums.
SHAPES = [
    (1, 1, 1),
    (5, 7, 3),
    (12, 32, 384),
    (13, 33, 385),
    (24, 64, 768),
    (100, 40, 1030),
    (300, 170, 129),
    (3, 500, 16),
]
PACKED_SHAPES = [(16, 16, 16), (12, 32, 128), (13, 48, 144), (160, 96, 256), (40, 16, 2064)]


@pytest.fixture(autouse=True)
def _needs_the_kernel() -> None:
    if not kernel.multiplies(ONE):
        pytest.skip("this CPU has no AVX-512 BF16, or the faster AMX, or there is no compiler")


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def bf16(rows: int, columns: int, *, seed: int, is_column: bool = False) -> Tensor:
    x = filled(rows, columns, dtype=torch.bfloat16, fill="normal", seed=seed)
    return x.t().contiguous().t() if is_column else x


def multiply(
    a: list[Tensor], b: list[Tensor], *, out_dtype: torch.dtype = torch.float32, alpha: Tensor = ONE
) -> Tensor:
    layouts = 2 * kernel.layout_of_values()
    return kernel.gemm(a, b, alpha, [None, None], layouts=layouts, out_dtype=out_dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("columns", [(False, False), (True, False), (False, True), (True, True)])
def test_values_in_every_layout(shape: tuple[int, int, int], columns: tuple[bool, bool]):
    rows_a, rows_b, depth = shape
    a = bf16(rows_a, depth, seed=0, is_column=columns[0])
    b = bf16(rows_b, depth, seed=1, is_column=columns[1])
    got = multiply([a], [b])
    sums = a.double().abs() @ b.double().abs().t()
    assert ((got.double() - a.double() @ b.double().t()).abs() <= depth * 2.0**-24 * sums).all()
    assert same_bits(multiply([a.contiguous()], [b.contiguous()]), got)
    assert same_bits(multiply([a], [b], out_dtype=torch.bfloat16), got.to(torch.bfloat16))


def test_a_view_with_gaps_between_its_rows():
    a, b = bf16(20, 100, seed=0)[:, 3:41], bf16(40, 38, seed=1)
    assert same_bits(multiply([a], [b]), multiply([a.contiguous()], [b]))


@pytest.mark.parametrize("depth", [64, 1030, 5000])
def test_the_bits_depend_on_neither_threads_nor_the_other_rows(threads: None, depth: int):
    a, b = bf16(157, depth, seed=0), bf16(133, depth, seed=1)
    whole = multiply([a], [b])
    for count in (1, 2, 3, 7):
        torch.set_num_threads(count)
        assert same_bits(multiply([a], [b]), whole)
    assert same_bits(multiply([a[40:57]], [b[70:]]), whole[40:57, 70:])


@pytest.mark.parametrize("alpha_shape", [(), (1, 1), (13, 1), (1, 33), (13, 33)])
def test_the_factor_of_the_tensor_of_rows_or_of_columns(alpha_shape: tuple[int, ...]):
    a, b = bf16(13, 70, seed=0), bf16(33, 70, seed=1)
    alpha = torch.rand(alpha_shape, generator=torch.Generator().manual_seed(2)) + 0.5
    expected = multiply([a], [b]) * alpha
    assert same_bits(multiply([a], [b], alpha=alpha), expected)
    assert same_bits(multiply([a], [b], alpha=alpha, out_dtype=torch.bfloat16), expected.to(torch.bfloat16))


def test_results_are_rounded_to_nearest_even_subnormal_and_not_finite_ones_too():
    sums = torch.tensor([1.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8, 3.3895e38, float("inf"), float("nan"), -0.0])
    a = torch.zeros(7, 6, dtype=torch.bfloat16)
    parts = [sums.to(torch.bfloat16)]  # three BF16 numbers add up to any FP32 number
    parts.append((sums - parts[0].float()).nan_to_num().to(torch.bfloat16))
    a[:, 0], a[:, 2] = parts[0], parts[1]
    b = torch.ones(1, 6, dtype=torch.bfloat16)
    b[0, 1], b[0, 3:] = 0.0, 0.0
    for alpha in (1.0, 2.0**-130, -(2.0**-140)):
        exact = multiply([a], [b], alpha=torch.tensor(alpha))
        assert same_bits(
            multiply([a], [b], alpha=torch.tensor(alpha), out_dtype=torch.bfloat16), exact.to(torch.bfloat16)
        )
    assert (multiply([a], [b], alpha=torch.tensor(2.0**-130))[:3] > 0).all()


@pytest.mark.parametrize("shape", [(0, 4, 8), (4, 0, 8), (4, 4, 0)])
def test_empty_operands(shape: tuple[int, int, int]):
    rows_a, rows_b, depth = shape
    got = multiply([bf16(rows_a, depth, seed=0)], [bf16(rows_b, depth, seed=1)])
    assert same_bits(got, torch.zeros(rows_a, rows_b))


def unpacked_bits(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype) -> Tensor:
    sides = (PackedOperand(a).unpacked(), PackedOperand(b).unpacked())
    return exact_gemm(*sides, mode=GemmMode.bf16_exact, out_dtype=out_dtype)


@pytest.mark.parametrize("shape", PACKED_SHAPES)
@pytest.mark.parametrize("fill", ["normal", "wide", "sparse", "nan", "zeros"])
def test_packed_codes_give_the_bits_of_their_values(shape: tuple[int, int, int], fill: str):
    rows_a, rows_b, depth = shape
    x = filled(rows_a, depth, dtype=torch.bfloat16, fill=fill, seed=0)
    w = filled(rows_b, depth, dtype=torch.bfloat16, fill="wide", seed=1)
    a = quantize(x, operand_spec(), direction=Direction.row)
    b = quantize(w, operand_spec(block=Block.tile_16x16), direction=Direction.row)
    for out_dtype in (torch.float32, torch.bfloat16):
        got = exact_gemm(PackedOperand(a), PackedOperand(b), mode=GemmMode.bf16_exact, out_dtype=out_dtype)
        assert same_bits(got, unpacked_bits(a, b, out_dtype))


@pytest.mark.parametrize(("rows", "depth"), [(16, 16), (48, 32), (80, 144), (272, 64)])
def test_tiles_are_read_in_the_other_direction(rows: int, depth: int):
    spec = operand_spec(block=Block.tile_16x16)
    w = filled(depth, rows, dtype=torch.bfloat16, fill="wide", seed=1)
    x = filled(24, depth, dtype=torch.bfloat16, fill="normal", seed=2)
    flipped = PackedOperand(quantize(w, spec, direction=Direction.row), is_transposed=True)
    a = PackedOperand(quantize(x, operand_spec(), direction=Direction.row))
    for left, right in ((a, flipped), (flipped, a)):
        got = exact_gemm(left, right, mode=GemmMode.bf16_exact, out_dtype=torch.float32)
        expected = exact_gemm(left.unpacked(), right.unpacked(), mode=GemmMode.bf16_exact, out_dtype=torch.float32)
        assert same_bits(got, expected)


@pytest.mark.parametrize("format", [Format.nvfp4, *MX_FORMATS, *FP8_FORMATS])
def test_every_code_under_every_scale_is_read_right(format: Format):
    """One row per scale byte, one column per code, times the identity: the products are the values themselves."""
    spec = format_spec(format)
    codes = torch.arange(16 if spec.is_packed else 256, dtype=torch.uint8)
    packed = codes[0::2] | codes[1::2] << 4 if spec.is_packed else codes
    blocks = -(-len(codes) // spec.block_size) if spec.block_size else 0
    scales = torch.arange(256, dtype=torch.uint8).view(256, 1).expand(256, blocks).contiguous()
    shape = (256, len(codes))
    table = QuantizedTensor(packed.expand(256, -1).contiguous(), scales, torch.ones(1), spec, shape, torch.bfloat16)
    one = GemmOperand(torch.ones(1, 2, dtype=torch.bfloat16), None, BF16)
    values = PackedOperand(table).values.float()
    smallest = torch.finfo(torch.bfloat16).smallest_normal  # instructions take what is below for zero
    values = torch.where(values.abs() < smallest, 0.0, values) + 0.0
    for first in range(0, len(codes), 2):
        bytes_of_pair = slice(first // 2, first // 2 + 1) if spec.is_packed else slice(first, first + 2)
        pair = replace(table, codes=table.codes[:, bytes_of_pair].contiguous(), shape=(256, 2))
        pair = replace(pair, block_scale=scales[:, :1].contiguous(), amax=torch.full((1,), largest_product(spec)))
        got = exact_gemm(PackedOperand(pair), one, mode=GemmMode.bf16_exact, out_dtype=torch.float32)
        assert same_bits(got[:, 0], values[:, first] + values[:, first + 1]), first


CHUNKED = [
    (format_spec(Format.fp8_e4m3, block=Block.row_1x128), format_spec(Format.fp8_e4m3, block=Block.tile_128x128)),
    (format_spec(Format.fp8_e5m2, block=Block.row_1x128), format_spec(Format.mxfp8_e4m3)),
    (format_spec(Format.mxfp4), format_spec(Format.fp8_e4m3, block=Block.tile_128x128)),
    (operand_spec(global_scale=GlobalScale.block_128), operand_spec()),
]
UNCHUNKED = [
    (format_spec(Format.mxfp4), format_spec(Format.mxfp4, block=Block.tile_32x32)),
    (format_spec(Format.mxfp8_e4m3), format_spec(Format.mxfp8_e5m2)),
    (format_spec(Format.fp8_e4m3), format_spec(Format.fp8_e5m2)),
    (format_spec(Format.fp8_e4m3), operand_spec()),
]


@pytest.mark.parametrize("specs", CHUNKED + UNCHUNKED)
@pytest.mark.parametrize("shape", [(40, 56, 320), (12, 33, 34), (157, 133, 512)])
def test_codes_of_every_format_give_the_bits_of_their_values(
    specs: tuple[OperandSpec, OperandSpec], shape: tuple[int, int, int]
):
    rows_a, rows_b, depth = shape
    a, b = (
        PackedOperand(
            quantize(filled(rows, depth, dtype=torch.bfloat16, fill=fill, seed=rows), spec, direction=Direction.row)
        )
        for rows, fill, spec in zip((rows_a, rows_b), ("normal", "wide"), specs, strict=True)
    )
    for out_dtype in (torch.float32, torch.bfloat16):
        got = exact_gemm(a, b, mode=GemmMode.bf16_exact, out_dtype=out_dtype)
        assert same_bits(got, exact_gemm(a.unpacked(), b.unpacked(), mode=GemmMode.bf16_exact, out_dtype=out_dtype))
        mixed = exact_gemm(a, b.unpacked(), mode=GemmMode.bf16_exact, out_dtype=out_dtype)
        assert same_bits(got, mixed)


@pytest.mark.parametrize("specs", CHUNKED)
def test_chunks_add_up_as_slices_do(specs: tuple[OperandSpec, OperandSpec]):
    a, b = (
        quantize_operand(
            filled(rows, 320, dtype=torch.bfloat16, fill="normal", seed=rows), spec, direction=Direction.row
        )
        for rows, spec in zip((40, 56), specs, strict=True)
    )

    def product(left: Tensor, right: Tensor) -> Tensor:
        return multiply([left], [right])

    expected = sum_blocks(a, b, width=128, multiply=product) * global_alpha(a, b)
    assert same_bits(exact_gemm(a, b, mode=GemmMode.bf16_exact, out_dtype=torch.float32), expected)


@pytest.mark.parametrize(
    "spec",
    [
        format_spec(Format.fp8_e4m3),
        format_spec(Format.mxfp8_e4m3, block=Block.tile_32x32),
        format_spec(Format.mxfp4, block=Block.tile_32x32),
        format_spec(Format.fp8_e4m3, block=Block.tile_128x128),
    ],
)
def test_codes_of_tiles_are_read_in_the_other_direction(spec: OperandSpec):
    w = filled(288, 160, dtype=torch.bfloat16, fill="wide", seed=1)
    x = filled(24, 288, dtype=torch.bfloat16, fill="normal", seed=2)
    flipped = PackedOperand(quantize(w, spec, direction=Direction.row), is_transposed=True)
    straight = PackedOperand(quantize(w, spec, direction=Direction.column))
    a = PackedOperand(quantize(x, format_spec(Format.fp8_e4m3), direction=Direction.row))
    for left, right, other in ((a, flipped, (a, straight)), (flipped, a, (straight, a))):
        got = exact_gemm(left, right, mode=GemmMode.bf16_exact, out_dtype=torch.float32)
        assert same_bits(got, exact_gemm(*other, mode=GemmMode.bf16_exact, out_dtype=torch.float32))


def test_codes_that_do_not_fill_a_block():
    x, w = (filled(10, 40, dtype=torch.bfloat16, fill="normal", seed=seed) for seed in (0, 1))
    a, b = (quantize(t, operand_spec(), direction=Direction.row) for t in (x, w))
    got = exact_gemm(PackedOperand(a), PackedOperand(b), mode=GemmMode.bf16_exact, out_dtype=torch.float32)
    assert same_bits(got, unpacked_bits(a, b, torch.float32))


@pytest.mark.parametrize("spec", [operand_spec(), operand_spec(global_scale=GlobalScale.row)])
def test_row_scales(spec: OperandSpec):
    x, w = (filled(24, 64, dtype=torch.bfloat16, fill="wide", seed=seed) for seed in (0, 1))
    a = quantize(x, operand_spec(global_scale=GlobalScale.row), direction=Direction.row)
    b = quantize(w, spec, direction=Direction.row)
    got = exact_gemm(PackedOperand(a), PackedOperand(b), mode=GemmMode.bf16_exact, out_dtype=torch.float32)
    assert same_bits(got, unpacked_bits(a, b, torch.float32))


def test_without_the_kernels_packed_operands_are_unpacked_first():
    a, b = (quantize(bf16(16, 64, seed=seed), operand_spec(), direction=Direction.row) for seed in (0, 1))
    fast = exact_gemm(PackedOperand(a), PackedOperand(b), mode=GemmMode.fp32_exact, out_dtype=torch.float32)
    with use("oracle"):
        assert not reads_packed(a.codes, a.spec)
        slow = exact_gemm(PackedOperand(a), PackedOperand(b), mode=GemmMode.fp32_exact, out_dtype=torch.float32)
    assert same_bits(fast, slow)


def test_operands_that_contract_different_lengths_are_an_error():
    a, b = (PackedOperand(quantize(bf16(16, k, seed=k), operand_spec(), direction=Direction.row)) for k in (32, 64))
    with pytest.raises(ValueError, match="different lengths, found 32 and 64"):
        exact_gemm(a, b, mode=GemmMode.auto, out_dtype=torch.float32)
