"""The report on a quantizer sees what is there: bias, error, dependence on shards, and a wrong result."""

from pathlib import Path

import pytest

from nvfp4_train.analysis.method import check_method, format_method
from nvfp4_train.numerics.spec import Rounding

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"

BAD = """
import torch
def shrinks(x, spec, stream, *, amax, factor=0.9):
    return x * factor
def ambient(x, spec, stream, *, amax):
    return x + 0.01 * torch.randn_like(x)
def own_maximum(x, spec, stream, *, amax):
    scale = x.abs().max()
    return (x / scale * 7).round() * scale / 7
"""


@pytest.fixture
def bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad_methods.py").write_text(BAD)
    monkeypatch.syspath_prepend(tmp_path)


def test_the_built_in_rounding_measures_as_itself():
    report = check_method("nvfp4_train.numerics.quantizer:built_in", rounding=Rounding.nearest_even, args={}, draws=2)
    assert report.method.mse == report.nearest.mse
    assert report.method.bias == pytest.approx(report.nearest.bias)
    assert report.repeats
    assert report.row_shards_equal
    assert report.column_shards_equal
    assert min(report.gradient_cosines.values()) > 0.98


def test_a_rounding_that_shrinks_shows_its_bias(bad: None):
    report = check_method("bad_methods:shrinks", rounding=Rounding.nearest_even, args={"factor": 0.75}, draws=2)
    assert report.method.bias == pytest.approx(-0.25, abs=1e-6)
    assert report.method.mse == pytest.approx(0.0625, abs=1e-6)


def test_ambient_randomness_and_maxima_of_shards_are_found(bad: None):
    ambient = check_method("bad_methods:ambient", rounding=Rounding.nearest_even, args={}, draws=2)
    assert not ambient.repeats
    shards = check_method("bad_methods:own_maximum", rounding=Rounding.nearest_even, args={}, draws=2)
    assert shards.repeats
    assert not (shards.row_shards_equal and shards.column_shards_equal)


def test_the_example_outside_the_package_is_unbiased_and_better_than_stochastic(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    report = check_method("ms_eden:ms_eden", rounding=Rounding.stochastic, args={}, draws=16)
    assert report.method.mse < 0.6 * report.stochastic.mse
    assert abs(report.method.bias) < abs(report.nearest.bias) / 4
    assert report.repeats
    assert report.row_shards_equal
    assert report.column_shards_equal
    assert min(report.gradient_cosines.values()) > 0.98
    assert "ms_eden:ms_eden" in format_method(report)


def test_an_unknown_function_is_an_error():
    with pytest.raises(ValueError, match="no_such_module"):
        check_method("no_such_module:f", rounding=Rounding.nearest_even, args={}, draws=1)
