"""Training gives the losses that it gave before."""

import pytest

from tests.support.golden_curves import RECIPES, read_curve, train_curve
from tests.support.runs import RunDirs

# Other CPUs add in another order. With AVX2 instead of AVX-512 BF16, losses differed by up to 1e-6, 6e-4 and 5e-3: a
# last digit of FP32 can tip a BF16 number over, which can tip an NVFP4 code over, and that moves its element by up to a
# third.
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-3, "nvfp4": 2e-2}


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_curve_is_the_golden_one(dirs: RunDirs, recipe: str):
    expected, found = read_curve(recipe), train_curve(dirs, recipe)
    assert [row.keys() for row in found] == [row.keys() for row in expected]
    for row, golden in zip(found, expected, strict=True):
        assert row == pytest.approx(golden, abs=TOLERANCE[recipe]), f"step {golden['step']}"


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_golden_curve_goes_down(recipe: str):
    curve = read_curve(recipe)
    assert curve[-1]["val/loss"] < curve[0]["val/loss"] - 0.8
