import itertools

import numpy as np
import pytest
import torch

from nvfp4_train.numerics.blockwise import exact_product, has_chunks, reference_width, sum_blocks
from nvfp4_train.numerics.formats import E2M1, E4M3, E5M2, Element, decode_codes, decode_e4m3, decode_e8m0
from nvfp4_train.numerics.gemm import PackedOperand, exact_gemm, global_alpha, reference_gemm
from nvfp4_train.numerics.kernels import use
from nvfp4_train.numerics.quantize import Direction, GemmOperand, dequantize, gemm_operand, quantize, quantize_operand
from nvfp4_train.numerics.spec import Block, Format, GemmMode, GlobalScale, OperandSpec
from tests.support.tensors import filled, format_spec, operand_spec, same_bits

MODES = [GemmMode.auto, GemmMode.bf16_exact, GemmMode.fp32_exact, GemmMode.fp32_blockwise]
SPECS = {
    "mxfp4": format_spec(Format.mxfp4),
    "mxfp4 tiles": format_spec(Format.mxfp4, block=Block.tile_32x32),
    "mxfp8_e4m3": format_spec(Format.mxfp8_e4m3),
    "mxfp8_e5m2": format_spec(Format.mxfp8_e5m2),
    "fp8_e4m3": format_spec(Format.fp8_e4m3),
    "fp8_e5m2": format_spec(Format.fp8_e5m2),
    "fp8 rows": format_spec(Format.fp8_e4m3, global_scale=GlobalScale.row),
    "fp8 blocks": format_spec(Format.fp8_e4m3, block=Block.row_1x128),
    "fp8 tiles": format_spec(Format.fp8_e4m3, block=Block.tile_128x128),
    "nvfp4": operand_spec(),
    "nvfp4 outer": operand_spec(global_scale=GlobalScale.block_128),
}
K = 320  # the last chunk of 128 is not whole


def operand(rows: int, spec: OperandSpec, *, seed: int) -> GemmOperand:
    return quantize_operand(
        filled(rows, K, dtype=torch.bfloat16, fill="normal", seed=seed), spec, direction=Direction.row
    )


def restored(rows: int, spec: OperandSpec, *, seed: int) -> torch.Tensor:
    x = filled(rows, K, dtype=torch.bfloat16, fill="normal", seed=seed)
    return dequantize(quantize(x, spec, direction=Direction.row)).double()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("left", "right"), [*zip(SPECS, SPECS, strict=True), *itertools.pairwise(SPECS)])
def test_only_sums_scales_and_the_result_are_rounded(left: str, right: str, mode: GemmMode, out_dtype: torch.dtype):
    a, b = operand(48, SPECS[left], seed=0), operand(32, SPECS[right], seed=1)
    got = exact_gemm(a, b, mode=mode, out_dtype=out_dtype)
    dequantized = restored(48, SPECS[left], seed=0), restored(32, SPECS[right], seed=1)
    expected, size = dequantized[0] @ dequantized[1].t(), dequantized[0].abs() @ dequantized[1].abs().t()
    rounding = expected.abs() * 2.0**-8 if out_dtype is torch.bfloat16 else 0.0
    assert got.dtype is out_dtype
    assert ((got.double() - expected).abs() <= size * (K + 8) * 2.0**-24 + rounding * 1.01).all()


@pytest.mark.parametrize("name", SPECS)
def test_the_reference_order_is_the_same_for_packed_operands_and_in_both_implementations(name: str):
    spec = SPECS[name]
    x, w = (filled(rows, K, dtype=torch.bfloat16, fill="normal", seed=rows) for rows in (32, 48))
    a, b = (quantize(matrix, spec, direction=Direction.row) for matrix in (x, w))
    results = []
    for backend in ("oracle", "compiled"):
        with use(backend):
            results.append(reference_gemm(a, b, out_dtype=torch.float32))
            unpacked = gemm_operand(a), gemm_operand(b)
            results.append(exact_gemm(*unpacked, mode=GemmMode.fp32_blockwise, out_dtype=torch.float32))
            packed = PackedOperand(a), PackedOperand(b)
            results.append(exact_gemm(*packed, mode=GemmMode.fp32_blockwise, out_dtype=torch.float32))
    assert all(same_bits(result, results[0]) for result in results)


def test_the_reference_order_by_hand():
    """Blocks of 32 in float64, rounded, and added in FP32."""
    a, b = operand(3, SPECS["mxfp8_e4m3"], seed=5), operand(4, SPECS["mxfp8_e4m3"], seed=6)
    expected = np.zeros((3, 4), dtype=np.float32)
    for start in range(0, K, 32):
        part = [side.values[:, start : start + 32].double().numpy() for side in (a, b)]
        expected = expected + (part[0] @ part[1].T).astype(np.float32)
    got = exact_gemm(a, b, mode=GemmMode.fp32_blockwise, out_dtype=torch.float32)
    assert np.array_equal(got.numpy(), expected)


def test_widths_of_the_reference_order():
    widths = {
        ("nvfp4", "nvfp4"): 16,
        ("mxfp4", "mxfp4"): 32,
        ("mxfp8_e4m3", "nvfp4"): 16,
        ("fp8_e4m3", "mxfp4"): 32,
        ("fp8_e4m3", "fp8_e5m2"): 128,
        ("nvfp4 outer", "nvfp4"): 128,
    }
    for (left, right), width in widths.items():
        assert reference_width(SPECS[left], SPECS[right]) == width
    assert [name for name, spec in SPECS.items() if has_chunks(spec)] == ["fp8 blocks", "fp8 tiles", "nvfp4 outer"]


@pytest.mark.parametrize("name", ["mxfp4 tiles", "fp8_e4m3", "fp8 tiles"])
@pytest.mark.parametrize("mode", MODES)
def test_a_weight_that_is_quantized_once_serves_dgrad(name: str, mode: GemmMode):
    spec = SPECS[name]
    w = filled(K, 144, dtype=torch.bfloat16, fill="wide", seed=3)
    dy = operand(32, SPECS["mxfp8_e4m3"], seed=4)
    packed = PackedOperand(quantize(w, spec, direction=Direction.row), is_transposed=True)
    fresh = quantize_operand(w, spec, direction=Direction.column)
    results = [exact_gemm(dy, weight, mode=mode, out_dtype=torch.float32) for weight in (packed, fresh)]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5 * results[1].abs().max().item())


def test_operands_without_a_factor_contribute_one():
    a, b = operand(3, SPECS["mxfp4"], seed=0), operand(4, SPECS["fp8 blocks"], seed=1)
    assert global_alpha(a, b).item() == 1.0
    c = operand(4, SPECS["fp8_e5m2"], seed=1)
    assert c.amax is not None
    assert global_alpha(a, c).item() == (c.amax / 57344).item()


def test_an_empty_contraction_is_zero():
    for spec in SPECS.values():
        empty = quantize_operand(torch.zeros(4, 0), spec, direction=Direction.row)
        for mode in MODES:
            assert torch.equal(exact_gemm(empty, empty, mode=mode, out_dtype=torch.float32), torch.zeros(4, 4))


def test_sums_go_up_and_products_are_rounded_once():
    a, b = operand(3, SPECS["fp8 blocks"], seed=0), operand(4, SPECS["nvfp4"], seed=1)
    starts = []

    def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        starts.append(left.storage_offset())
        return exact_product(left, right)

    assert sum_blocks(a, b, width=64, multiply=multiply).shape == (3, 4)
    assert starts == list(range(0, K, 64))


def all_values(element: Element) -> torch.Tensor:
    codes = torch.arange(16 if element is E2M1 else 256, dtype=torch.uint8)
    values = decode_codes(codes, element)
    return values[values.isfinite()]


def products_that_bf16_lacks(elements: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Elements times scales in float64, where they are exact, that change when rounded to BF16."""
    products = torch.outer(elements.double(), scales.double())
    return products[products.to(torch.bfloat16).double() != products]


def test_every_nvfp4_code_times_every_scale_is_a_bf16_number():
    scales = decode_e4m3(torch.arange(127, dtype=torch.uint8))
    assert products_that_bf16_lacks(all_values(E2M1), scales).numel() == 0
    sizes = torch.outer(all_values(E2M1).abs(), scales)
    assert (sizes[sizes > 0].min().item(), sizes.max().item()) == (2.0**-10, 2688.0)


@pytest.mark.parametrize("element", [E4M3, E5M2])
def test_every_fp8_code_is_a_bf16_number(element: Element):
    values = all_values(element)
    assert products_that_bf16_lacks(values, torch.ones(1)).numel() == 0
    smallest = 2.0 ** (element.smallest_exponent - element.mantissa_bits)
    assert (values.abs()[values != 0].min().item(), values.max().item()) == (smallest, element.largest)


@pytest.mark.parametrize("element", [E2M1, E4M3, E5M2])
def test_every_mx_code_times_every_scale_is_a_bf16_number_in_its_normal_range(element: Element):
    scales = decode_e8m0(torch.arange(255, dtype=torch.uint8))
    lacking = products_that_bf16_lacks(all_values(element), scales).abs()
    assert not ((lacking >= 2.0**-126) & (lacking < 2.0**128)).any()
    below = lacking[lacking < 2.0**-126]
    assert (below < 2.0**-130).all()
    assert (below.numel() == 0) is (element is E2M1)


@pytest.mark.parametrize("left", [E2M1, E4M3, E5M2])
@pytest.mark.parametrize("right", [E2M1, E4M3, E5M2])
def test_every_product_of_two_codes_is_an_fp32_number(left: Element, right: Element):
    products = torch.outer(all_values(left).double(), all_values(right).double())
    assert torch.equal(products.float().double(), products)


def test_small_mx_operands_need_fp32_products():
    """BF16 instructions flush what lies below BF16's normal numbers; the other modes keep it."""
    x = torch.full((4, 32), 2.0**-128)
    a = quantize_operand(x, SPECS["mxfp8_e4m3"], direction=Direction.row)
    one = quantize_operand(torch.ones(4, 32), SPECS["mxfp8_e4m3"], direction=Direction.row)
    for mode in (GemmMode.fp32_exact, GemmMode.fp32_blockwise):
        assert exact_gemm(a, one, mode=mode, out_dtype=torch.float32).unique().tolist() == [2.0**-123]
