import math

import pytest

from nvfp4_train.config.convert import convert_value, mismatch
from nvfp4_train.config.logging import WandbMode
from nvfp4_train.numerics.spec import Rounding


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        ("a", str, "a"),
        (2024, str, "2024"),
        (3, int, 3),
        (2e6, int, 2_000_000),
        (3, float, 3.0),
        (math.inf, float, math.inf),
        (False, bool, False),
        ("stochastic", Rounding, Rounding.stochastic),
        (False, WandbMode, WandbMode.off),  # what YAML makes of an unquoted off
        (["a", 1], list[str], ["a", "1"]),
        ({"a": 1, "b": 0.5}, dict[str, float], {"a": 1.0, "b": 0.5}),
        ({1: 2e9}, dict[str, int] | None, {"1": 2_000_000_000}),
        (None, int | None, None),
        (3, int | None, 3),
    ],
)
def test_values_that_fit(value, hint, expected):
    found = convert_value(value, hint)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (1.5, str),
        (True, str),
        (None, str),
        (1.5, int),
        (math.inf, int),
        (math.nan, int),
        ("3", int),
        (True, int),
        ("x", float),
        (True, float),
        (None, float),
        (1, bool),
        ("true", bool),
        ("stochastik", Rounding),
        (False, Rounding),
        (1, Rounding),
        ("a", list[str]),
        ([None], list[str]),
        ("x", int | None),
        ({}, int),
        ({"a": "x"}, dict[str, float]),
        ([1], dict[str, float]),
        (0.5, dict[str, float] | None),
        ([], int),
    ],
)
def test_values_that_do_not_fit(value, hint):
    with pytest.raises(TypeError):
        convert_value(value, hint)


@pytest.mark.parametrize(
    ("value", "hint", "rule", "fix"),
    [
        ("stochastik", Rounding, "must be one of nearest_even, stochastic", "did you mean stochastic?"),
        (1.5, int, "must be a whole number", "for example a.b=16"),
        ("x", int | None, "must be a whole number or null", "for example a.b=16"),
        ("a", list[str], "must be a list of texts", "for example a.b='[a,b]'"),
        (3, dict[str, float], "must be names with a number each", "for example a.b='{a: 1, b: 2}'"),
        ("yes", bool, "must be true or false", "for example a.b=true"),
    ],
)
def test_a_mismatch_says_what_fits(value, hint, rule, fix):
    problem = mismatch("a.b", value, hint)
    assert (problem.key, problem.value, problem.rule) == ("a.b", value, rule)
    assert problem.fix.startswith(fix)
