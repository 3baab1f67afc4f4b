import numpy as np
import pytest
import torch

from nvfp4_train.numerics.formats import (
    decode_e2m1,
    decode_e4m3,
    e2m1_values,
    encode_e4m3,
    pack_codes,
    round_to_e4m3,
    unpack_codes,
)
from tests.support import oracle


def test_the_16_values():
    assert e2m1_values().tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert e2m1_values()[8].signbit()


def test_the_even_column_is_in_the_low_nibble():
    codes = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    assert pack_codes(codes).tolist() == [[0x21, 0x0F]]


def test_unpacking_undoes_packing():
    codes = torch.arange(256, dtype=torch.uint8).view(8, 32) % 16
    assert torch.equal(unpack_codes(pack_codes(codes)), codes)


def test_an_odd_number_of_codes_cannot_be_packed():
    with pytest.raises(ValueError, match="must be even"):
        pack_codes(torch.zeros(2, 3, dtype=torch.uint8))


def test_every_scale_byte_decodes_to_its_definition():
    positive = decode_e4m3(torch.arange(127, dtype=torch.uint8))
    assert np.array_equal(positive.numpy(), oracle.E4M3_GRID.astype(np.float32))
    assert decode_e4m3(torch.tensor([0x7F, 0xFF], dtype=torch.uint8)).isnan().all()


def scale_probes() -> torch.Tensor:
    grid = torch.tensor(oracle.E4M3_GRID, dtype=torch.float32)
    middles = (grid[1:] + grid[:-1]) / 2
    around = [torch.nextafter(middles, torch.full_like(middles, side)) for side in (0.0, 500.0)]
    beyond = torch.tensor([448.0, 460.0, 464.0, 1e30, float("inf"), 1e-40, 2.0**-10, 0.0])
    return torch.cat([grid, middles, *around, beyond])


def test_scales_round_to_nearest_even_and_saturate():
    probes = scale_probes()
    assert encode_e4m3(probes).tolist() == [oracle.encode_e4m3(value) for value in probes.tolist()]


def test_nan_scales_stay_nan():
    nan = torch.tensor([float("nan"), -float("nan")])
    assert encode_e4m3(nan).tolist() == [0x7F, 0x7F]
    assert round_to_e4m3(nan).isnan().all()


def test_rounding_without_a_float8_cast_is_the_same():
    probes = scale_probes()
    assert torch.equal(round_to_e4m3(probes), decode_e4m3(encode_e4m3(probes)))


def test_every_code_times_scale_is_exact_in_bf16():
    codes = decode_e2m1(torch.arange(16, dtype=torch.uint8))
    scales = decode_e4m3(torch.arange(127, dtype=torch.uint8))
    products = torch.outer(codes.double(), scales.double())
    assert torch.equal(products.to(torch.bfloat16).double(), products)
