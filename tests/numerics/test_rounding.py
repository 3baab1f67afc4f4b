import pytest
import torch

from nvfp4_train.numerics.formats import decode_e2m1, e2m1_values
from nvfp4_train.numerics.kernels import native
from nvfp4_train.numerics.rounding import round_nearest_even, round_stochastic
from tests.support import oracle

TIES = {0.25: 0, 0.75: 2, 1.25: 2, 1.75: 4, 2.5: 4, 3.5: 6, 5.0: 6}
ALL_BYTES = torch.arange(256, dtype=torch.uint8)


@pytest.mark.parametrize(("value", "code"), TIES.items())
def test_ties_go_to_the_even_mantissa(value: float, code: int):
    tie = torch.tensor([value])
    below, above = torch.nextafter(tie, torch.tensor(0.0)), torch.nextafter(tie, torch.tensor(9.0))
    assert round_nearest_even(torch.cat([below, tie, above])).tolist() == [
        oracle.nearest_code(below.item()),
        code,
        oracle.nearest_code(above.item()),
    ]
    assert round_nearest_even(-tie).item() == code + 8


def test_nearest_even_agrees_with_a_search_in_the_table():
    values = torch.randn(4000, generator=torch.Generator().manual_seed(0)) * 3
    assert round_nearest_even(values).tolist() == [oracle.nearest_code(value) for value in values.tolist()]


def test_special_values():
    values = torch.tensor([0.0, -0.0, -1e-45, float("inf"), -float("inf"), float("nan")])
    assert round_nearest_even(values).tolist() == [0, 0, 8, 7, 15, 0]
    assert round_stochastic(values, torch.zeros(6, dtype=torch.uint8)).tolist() == [0, 8, 8, 7, 15, 0]


@pytest.mark.parametrize("value", e2m1_values().tolist())
def test_values_on_the_grid_never_move(value: float):
    rounded = decode_e2m1(round_stochastic(torch.full((256,), value), ALL_BYTES))
    assert (rounded == value).all()


@pytest.mark.parametrize(
    ("lower", "upper"), [(0.0, 0.5), (0.5, 1.0), (1.0, 1.5), (1.5, 2.0), (2.0, 3.0), (3.0, 4.0), (4.0, 6.0)]
)
def test_the_probability_is_the_distance_in_steps_of_1_in_256(lower: float, upper: float):
    for numerator in (1, 64, 100, 255):
        value = lower + (upper - lower) * numerator / 256
        for sign in (1.0, -1.0):
            rounded = decode_e2m1(round_stochastic(torch.full((256,), sign * value), ALL_BYTES))
            assert sorted(rounded.abs().unique().tolist()) == [lower, upper]
            assert (rounded.abs() == upper).sum().item() == numerator


def test_stochastic_agrees_with_the_second_implementation():
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(3000, generator=generator) * 3
    noise = torch.randint(0, 256, (3000,), generator=generator, dtype=torch.uint8)
    expected = [oracle.stochastic_code(*pair) for pair in zip(values.numpy(), noise.tolist(), strict=True)]
    assert round_stochastic(values, noise).tolist() == expected


def test_compiled_rounding_is_the_same_for_every_bf16_number():
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    codes = round_nearest_even(every)
    assert torch.equal(native.round_nearest_even(every), codes[0::2] | codes[1::2] << 4)
