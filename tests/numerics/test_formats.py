import numpy as np
import pytest
import torch

from nvfp4_train.numerics.formats import (
    E2M1,
    E4M3,
    E5M2,
    Element,
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    decode_element,
    e2m1_values,
    encode_e4m3,
    encode_e8m0,
    encode_element,
    grid_step,
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


FLOAT8 = {"e4m3": (E4M3, torch.float8_e4m3fn), "e5m2": (E5M2, torch.float8_e5m2)}


@pytest.mark.parametrize("name", FLOAT8)
def test_every_code_decodes_as_the_float8_cast(name: str):
    element, dtype = FLOAT8[name]
    codes = torch.arange(256, dtype=torch.uint8)
    decoded, cast = decode_element(codes, element), codes.view(dtype).float()
    finite = cast.isfinite()
    assert torch.equal(decoded[finite], cast[finite])
    assert torch.equal(decoded.signbit()[finite], cast.signbit()[finite])
    assert decoded[~finite].isnan().all()


@pytest.mark.parametrize("name", FLOAT8)
def test_rounding_without_a_float8_cast_is_the_cast(name: str):
    """At every number of the grid, every tie, what surrounds them, and 10^5 others; what saturates is clamped first."""
    element, dtype = FLOAT8[name]
    grid = torch.tensor(oracle.GRIDS[name], dtype=torch.float32)
    middles = (grid[1:] + grid[:-1]) / 2
    around = [torch.nextafter(point, torch.tensor(side)) for point in (grid, middles) for side in (0.0, 1e30)]
    random = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    spread = random * 2.0 ** torch.randint(-30, 20, random.shape, generator=torch.Generator().manual_seed(1))
    probes = torch.cat([grid, middles, *around, spread, torch.tensor([2.0**-149, 1e-40, 1e30, float("inf")])])
    probes = torch.cat([probes, -probes])
    expected = probes.clamp(-element.largest, element.largest).to(dtype).view(torch.uint8)
    assert torch.equal(encode_element(probes, element), expected)
    assert encode_element(torch.tensor([float("nan")]), element).item() == 0x7F


@pytest.mark.parametrize(("name", "element"), [("e2m1", E2M1), ("e4m3", E4M3), ("e5m2", E5M2)])
def test_the_step_is_the_distance_to_the_next_number(name: str, element: Element):
    grid = torch.tensor(oracle.GRIDS[name], dtype=torch.float32)
    assert torch.equal(grid_step(grid[:-1], element), grid[1:] - grid[:-1])
    assert element.largest == grid[-1]
    assert 2.0**element.largest_exponent <= element.largest < 2.0 ** (element.largest_exponent + 1)


def test_every_power_of_two_decodes_to_its_definition():
    decoded = decode_e8m0(torch.arange(256, dtype=torch.int32).to(torch.uint8))
    assert decoded[:255].tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert decoded[255].isnan()


@pytest.mark.parametrize(("name", "element"), [("e2m1", E2M1), ("e4m3", E4M3), ("e5m2", E5M2)])
@pytest.mark.parametrize("round_up", [True, False])
def test_powers_of_two_at_every_boundary(name: str, element: Element, round_up: bool):
    powers = 2.0 ** torch.arange(-126, 128, dtype=torch.float64)
    points = torch.cat([powers, powers * element.largest / 2.0**element.largest_exponent]).float()
    points = points[points.isfinite()]
    around = [torch.nextafter(points, torch.full_like(points, side)) for side in (0.0, float("inf"))]
    tiny = torch.tensor([0.0, 2.0**-149, 1e-40])
    probes = torch.cat([points, *around, tiny, torch.tensor([float("inf"), float("nan"), -float("nan")])])
    expected = [oracle.power_of_two_scale(value, name, floor=not round_up) for value in probes.tolist()]
    assert encode_e8m0(probes, element, round_up=round_up).tolist() == expected
