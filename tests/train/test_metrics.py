import math

import pytest
import torch
from torch import nn

from nvfp4_train.train.metrics import (
    Stopwatch,
    Throughput,
    count_labels,
    find_non_finite_parameter,
    first_non_finite,
    is_finite,
    is_true_on_any_rank,
    read_scalars,
    read_step,
)
from nvfp4_train.train.state import TrainState
from tests.support.fake_engine import FakeMesh, fake_batch, step_result


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_numbers_are_read_exactly():
    values = read_step(step_result(loss=1 / 3, grad_norm=2 / 3))
    assert values.loss == torch.tensor(1 / 3).item()
    assert values.grad_norm == torch.tensor(2 / 3).item()


def test_scalars_of_several_dtypes_are_read_together():
    scalars = {"a": torch.tensor(1 / 3), "b": torch.tensor(7), "c": torch.tensor(0.5, dtype=torch.float64)}
    assert read_scalars(scalars) == {"a": torch.tensor(1 / 3).item(), "b": 7.0, "c": 0.5}
    assert read_scalars({}) == {}


def test_labels_are_counted_over_microbatches_and_ranks():
    count = count_labels([fake_batch(1), fake_batch(2)], mesh=FakeMesh(others=5.0))
    assert count.dtype is torch.float32
    assert float(count) == 11.0


@pytest.mark.parametrize(("flag", "others", "expected"), [(False, 0, False), (True, 0, True), (False, 2, True)])
def test_one_rank_is_enough(flag: bool, others: float, expected: bool):
    assert is_true_on_any_rank(flag=flag, mesh=FakeMesh(others=others)) is expected


@pytest.mark.parametrize(("value", "expected"), [(1.0, True), (math.nan, False), (-math.inf, False)])
def test_nan_and_infinity_are_not_finite(value: float, expected: bool):
    assert is_finite(torch.tensor([0.0, value])) is expected


def test_the_stopwatch_does_not_count_pauses():
    clock = Clock()
    watch = Stopwatch(clock)
    clock.now += 2
    with watch.paused():
        clock.now += 50
    clock.now += 1
    assert watch.seconds == 3


def test_the_stopwatch_goes_on_after_an_error_in_a_pause():
    clock = Clock()
    watch = Stopwatch(clock)

    def fail() -> None:
        with watch.paused():
            clock.now += 50
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        fail()
    clock.now += 1
    assert watch.seconds == 1


def test_throughput_is_that_of_the_last_lap():
    clock = Clock()
    watch = Stopwatch(clock)
    throughput = Throughput(tokens=100, stopwatch=watch)
    clock.now += 2
    assert throughput.lap(TrainState(tokens=300)) == 100
    with watch.paused():
        clock.now += 50
    clock.now += 4
    assert throughput.lap(TrainState(tokens=340)) == 10


def test_the_first_parameter_that_is_not_finite_is_named():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert find_non_finite_parameter(model) is None
    with torch.no_grad():
        model[1].bias[1] = math.nan
    assert find_non_finite_parameter(model) == "1.bias"
    assert find_non_finite_parameter(nn.Identity()) is None


def test_the_first_tensor_that_is_not_finite_is_named():
    fine, infinite, missing = torch.ones(2), torch.tensor([0.0, -math.inf]), torch.tensor([math.nan])
    assert first_non_finite({"fine": fine, "infinite": infinite, "missing": missing}) == "infinite"
    assert first_non_finite({"missing": missing, "fine": fine, "infinite": infinite}) == "missing"
    assert first_non_finite({"fine": fine}) is None
    assert first_non_finite({}) is None
