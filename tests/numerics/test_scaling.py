import numpy as np
import pytest
import torch

from nvfp4_train.numerics.formats import decode_e2m1, decode_e4m3
from nvfp4_train.numerics.scaling import (
    FP32_MAX,
    block_amax,
    block_scales,
    chunk_amax,
    decode_chunks,
    encode_factors,
    four_over_six,
    global_factors,
    largest_product,
    safe_amax,
    scale_elements,
)
from nvfp4_train.numerics.spec import Block, Format, GlobalScale, ScaleRule
from tests.support.tensors import filled, format_spec, operand_spec


def test_the_global_factor_is_a_true_division():
    """PyTorch's `2688.0 / tensor` is two roundings; a quarter of the values would differ."""
    amax = torch.rand(1000, generator=torch.Generator().manual_seed(0)) * 100
    expected = np.float32(2688.0) / amax.numpy()
    assert np.array_equal(global_factors(amax, 2688.0).encode.numpy(), expected)
    assert not np.array_equal((2688.0 / amax).numpy(), expected)


@pytest.mark.parametrize(
    ("amax", "encode", "decode"),
    [
        (0.0, FP32_MAX, 2.938736e-39),
        (1e-38, FP32_MAX, 2.938736e-39),
        (float("inf"), 1.0, 1.0),
        (2688.0, 1.0, 1.0),
        (3e38, 2688.0 / 3e38, 3e38 / 2688.0),
    ],
)
def test_extreme_amax(amax: float, encode: float, decode: float):
    factors = global_factors(torch.tensor(amax), 2688.0)
    assert factors.encode.item() == pytest.approx(encode, rel=1e-6)
    assert factors.decode.item() == pytest.approx(decode, rel=1e-6)


def test_nan_reaches_the_scales():
    factors = global_factors(torch.tensor(float("nan")), 2688.0)
    assert block_scales(torch.tensor([[1.0, 0.0]]), factors, operand_spec()).tolist() == [[0x7F, 0x7F]]


def test_a_block_too_small_for_a_scale_keeps_the_largest_factor():
    factors = global_factors(torch.tensor(1.0), 2688.0)
    scales = block_scales(torch.tensor([[1e-7, 1.0]]), factors, operand_spec())
    assert scales.tolist() == [[0, 0x7E]]
    assert encode_factors(scales, factors, operand_spec())[0, 0] == FP32_MAX
    elements = torch.tensor([[1e-7] * 16 + [1.0] * 16])
    scaled = scale_elements(elements, encode_factors(scales, factors, operand_spec()), width=16)
    assert scaled[0, 0] > 1e31  # saturates
    assert scaled[0, 16] == 6.0


def test_tiles_share_a_maximum():
    x = torch.zeros(32, 32)
    x[3, 20] = -5.0
    assert block_amax(x, 16, is_tile=False).nonzero().tolist() == [[3, 1]]
    assert block_amax(x, 16, is_tile=True).tolist() == [[0.0, 5.0]] * 16 + [[0.0, 0.0]] * 16


def decoded_error(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, amax: float, power: int) -> torch.Tensor:
    values = decode_e2m1(codes).double() * decode_e4m3(scales).double().repeat_interleave(16, dim=1) * amax / 1536
    return ((values - x.double()).abs() ** power).unflatten(1, (-1, 16)).sum(dim=-1)


@pytest.mark.parametrize(
    ("rule", "power"), [(ScaleRule.four_over_six_mae, 1), (ScaleRule.four_over_six_mse, 2)], ids=["mae", "mse"]
)
def test_four_over_six_takes_the_better_scale(rule: ScaleRule, power: int):
    x = filled(8, 128, dtype=torch.float32, fill="normal", seed=0)
    amax = x.abs().max()
    factors, largest = global_factors(amax.reshape(1, 1), 1536.0), block_amax(x, 16, is_tile=False)
    spec = operand_spec(scale_rule=rule, block_scale_max=256)
    codes, scales = four_over_six(x, largest, factors, spec)
    chosen = decoded_error(x, codes, scales, amax.item(), power)
    largest_code = decode_e2m1(codes).abs().unflatten(1, (-1, 16)).amax(dim=-1)
    assert set(largest_code.flatten().tolist()) == {4.0, 6.0}
    for target in (6.0, 4.0):
        fixed = torch.full_like(largest, 6.0 / target) * largest / 6 * factors.encode
        scale = fixed.to(torch.float8_e4m3fn).view(torch.uint8)
        scaled = scale_elements(x, encode_factors(scale, factors, spec), width=16).clamp(-6, 6)
        grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        nearest = (scaled.abs().unsqueeze(-1) - grid).abs().argmin(dim=-1).to(torch.uint8) | (scaled < 0) * 8
        assert (chosen <= decoded_error(x, nearest, scale, amax.item(), power) * (1 + 1e-5)).all()


def test_chunks_of_a_matrix_that_they_do_not_fill():
    x = torch.zeros(130, 200)
    x[129, 199] = -3.0
    x[0, 0] = 2.0
    rows = chunk_amax(x, format_spec(Format.fp8_e4m3, block=Block.row_1x128))
    assert rows.shape == (130, 2)
    assert rows.nonzero().tolist() == [[0, 0], [129, 1]]
    tiles = chunk_amax(x, format_spec(Format.fp8_e4m3, block=Block.tile_128x128))
    assert tiles.tolist() == [[2.0, 0.0]] * 128 + [[0.0, 3.0]] * 2


@pytest.mark.parametrize("format", [Format.fp8_e4m3, Format.fp8_e5m2])
@pytest.mark.parametrize("amax", [2.0**-149, 1e-40, 1e-36, 1.0, 3e38])
def test_encoding_and_decoding_are_inverse_down_to_subnormal_tensors(format: Format, amax: float):
    spec = format_spec(format)
    exact = torch.tensor([amax])
    encode = global_factors(safe_amax(exact, spec), largest_product(spec)).encode
    assert (encode.double() * decode_chunks(exact, spec).double()).item() == pytest.approx(1.0, rel=1e-6)


def test_a_published_nvfp4_scale_is_not_bounded():
    amax = torch.tensor([1e-38])
    assert safe_amax(amax, operand_spec()) is amax
    bounded = safe_amax(amax, operand_spec(global_scale=GlobalScale.block_128))
    assert bounded.item() == pytest.approx(2688.0 / FP32_MAX)
