import logging

import pytest
import torch

from nvfp4_train.numerics import gemm
from nvfp4_train.numerics.gemm import exact_gemm, global_alpha, reference_gemm
from nvfp4_train.numerics.kernels import use
from nvfp4_train.numerics.quantize import Direction, GemmOperand, gemm_operand, quantize, quantize_operand
from nvfp4_train.numerics.spec import Block, Format, GemmMode, GlobalScale, OperandSpec, Rounding
from tests.support.tensors import filled, operand_spec, same_bits

MODES = list(GemmMode)
DTYPES = [torch.float32, torch.bfloat16]
K = 256


def cast_spec(format: Format) -> OperandSpec:
    return OperandSpec(format=format, block=Block.none, rounding=Rounding.nearest_even)


def operand(rows: int, seed: int, spec: OperandSpec) -> GemmOperand:
    x = filled(rows, K, dtype=torch.bfloat16, fill="normal", seed=seed)
    return quantize_operand(x, spec, direction=Direction.row)


def exact(a: GemmOperand, b: GemmOperand) -> tuple[torch.Tensor, torch.Tensor]:
    """The product in float64, and the scale of its rounding errors: the sum of the magnitudes."""
    alpha = global_alpha(a, b).double()
    product = a.values.double() @ b.values.double().t()
    return alpha * product, alpha * (a.values.double().abs() @ b.values.double().abs().t())


SPECS = {
    "nvfp4": (operand_spec(), operand_spec(block=Block.tile_16x16)),
    "bf16": (cast_spec(Format.bf16), cast_spec(Format.bf16)),
    "mixed": (operand_spec(), cast_spec(Format.bf16)),
    "rows": (operand_spec(global_scale=GlobalScale.row), operand_spec()),
    "rows_and_rows": (operand_spec(global_scale=GlobalScale.row), operand_spec(global_scale=GlobalScale.row)),
}


@pytest.mark.parametrize("specs", SPECS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_only_the_sums_and_the_result_are_rounded(specs: str, mode: GemmMode, out_dtype: torch.dtype):
    a, b = (operand(rows, rows, spec) for rows, spec in zip((48, 32), SPECS[specs], strict=True))
    got = exact_gemm(a, b, mode=mode, out_dtype=out_dtype)
    expected, magnitude = exact(a, b)
    assert got.dtype is out_dtype
    sums = magnitude * K * 2.0**-24
    rounding = expected.abs() * (2.0**-8 if out_dtype is torch.bfloat16 else 2.0**-23)
    assert ((got.double() - expected).abs() <= sums + rounding * 1.01).all()


def test_the_factor_is_applied_before_the_rounding():
    """Rounding twice, before and after the factor, changes a quarter of the results; the sums' order 1 in 1000."""
    a, b = operand(128, 0, operand_spec()), operand(128, 1, operand_spec())
    got = exact_gemm(a, b, mode=GemmMode.bf16_exact, out_dtype=torch.bfloat16)
    once = exact(a, b)[0].float().to(torch.bfloat16)
    twice = (a.values @ b.values.t()) * global_alpha(a, b).to(torch.bfloat16)
    assert (got != once).float().mean() < 2e-3
    assert (twice != once).float().mean() > 0.1


@pytest.mark.parametrize("mode", MODES)
def test_transposed_weights_give_dgrad(mode: GemmMode):
    spec = operand_spec(block=Block.tile_16x16)
    w = filled(K, 64, dtype=torch.bfloat16, fill="normal", seed=3)
    dy = operand(32, 4, operand_spec())
    cached = quantize_operand(w, spec, direction=Direction.row).transposed()
    fresh = quantize_operand(w, spec, direction=Direction.column)
    results = [exact_gemm(dy, weight, mode=mode, out_dtype=torch.float32) for weight in (cached, fresh)]
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_fp32_operands_are_multiplied_in_fp32():
    spec = cast_spec(Format.fp32)
    x = filled(16, 64, dtype=torch.float32, fill="normal", seed=0)
    a = quantize_operand(x, spec, direction=Direction.row)
    got = exact_gemm(a, a, mode=GemmMode.auto, out_dtype=torch.float32)
    torch.testing.assert_close(got.double(), x.double() @ x.double().t(), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="bf16_exact with an fp32 operand"):
        exact_gemm(a, a, mode=GemmMode.bf16_exact, out_dtype=torch.float32)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_nan_reaches_the_result(mode: GemmMode, out_dtype: torch.dtype):
    x = torch.ones(16, 32, dtype=torch.bfloat16)
    x[0, 0] = float("nan")
    a = quantize_operand(x, operand_spec(), direction=Direction.row)
    assert exact_gemm(a, a, mode=mode, out_dtype=out_dtype).isnan().all()


def test_precision_flags_are_put_back():
    flags = torch.backends.mkldnn.matmul
    before = flags.fp32_precision
    a = operand(16, 0, operand_spec())
    exact_gemm(a, a, mode=GemmMode.bf16_exact, out_dtype=torch.float32)
    assert flags.fp32_precision == before


@pytest.mark.parametrize(("supported", "mode"), [(True, GemmMode.bf16_exact), (False, GemmMode.fp32_exact)])
def test_auto_follows_the_cpu_and_says_so_once(
    supported: bool, mode: GemmMode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: supported)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    gemm._cpu_mode.cache_clear()
    a = operand(16, 0, operand_spec())
    with caplog.at_level(logging.INFO):
        results = [exact_gemm(a, a, mode=GemmMode.auto, out_dtype=torch.bfloat16) for _ in range(2)]
    gemm._cpu_mode.cache_clear()
    assert same_bits(results[0], exact_gemm(a, a, mode=mode, out_dtype=torch.bfloat16))
    assert [record.message for record in caplog.records].count(caplog.messages[0]) == 1
    assert f"auto is {mode}" in caplog.text


@pytest.mark.parametrize("out_dtype", DTYPES)
def test_the_reference_is_near_and_its_implementations_agree(out_dtype: torch.dtype):
    x, w = (filled(rows, K, dtype=torch.bfloat16, fill="normal", seed=rows) for rows in (32, 48))
    a = quantize(x, operand_spec(), direction=Direction.row)
    b = quantize(w, operand_spec(block=Block.tile_16x16), direction=Direction.row)
    results = []
    for backend in ("oracle", "compiled"):
        with use(backend):
            results.append(reference_gemm(a, b, out_dtype=out_dtype))
    assert same_bits(*results)
    expected = exact_gemm(gemm_operand(a), gemm_operand(b), mode=GemmMode.fp32_exact, out_dtype=torch.float32)
    tolerance = 1e-2 if out_dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(results[0].float(), expected, rtol=tolerance, atol=1e-4)


def test_an_empty_contraction_is_zero():
    empty = quantize(torch.zeros(4, 0), operand_spec(), direction=Direction.row)
    assert torch.equal(reference_gemm(empty, empty, out_dtype=torch.float32), torch.zeros(4, 4))


def test_the_gemm_compiles_without_a_graph_break():
    a, b = operand(32, 0, operand_spec()), operand(16, 1, operand_spec())

    def multiply(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        operands = GemmOperand(x, a.amax, a.spec), GemmOperand(w, b.amax, b.spec)
        return exact_gemm(*operands, mode=GemmMode.auto, out_dtype=torch.bfloat16)

    compiled = torch.compile(multiply, fullgraph=True, backend="aot_eager")
    assert same_bits(compiled(a.values, b.values), multiply(a.values, b.values))
