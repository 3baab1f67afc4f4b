import math
from dataclasses import dataclass

import pytest

from nvfp4_train.config.problem import (
    NO_VALUE,
    ConfigError,
    Problem,
    Rule,
    check,
    findings,
    is_complete,
    not_negative,
    positive,
    report,
    require,
    violations,
)


@dataclass(kw_only=True, slots=True)
class Inner:
    size: int


@dataclass(kw_only=True, slots=True)
class Outer:
    width: float
    inner: Inner


def unset(cls: type, **values: object) -> object:
    """An object of a config class of which only these fields have a value."""
    cfg = object.__new__(cls)
    for name, value in values.items():
        setattr(cfg, name, value)
    return cfg


def problem(key: str = "a.b", value: object = 3) -> Problem:
    return Problem(key=key, value=value, rule="must be even", fix="use 4")


@pytest.mark.parametrize(
    ("value", "line"),
    [(3, "a.b = 3"), ("x", "a.b = x"), ("", "a.b = ''"), (None, "a.b = null"), (True, "a.b = true"), (NO_VALUE, "a.b")],
)
def test_a_problem_shows_key_value_rule_and_fix(value, line):
    assert str(problem(value=value)).splitlines() == [line, "    rule: must be even", "    fix:  use 4"]


def test_a_problem_moves_below_its_group():
    assert problem().below("model").key == "model.a.b"
    assert problem().below("").key == "a.b"


def test_an_infinite_value_is_said_to_be_one():
    cfg = unset(Outer, width=math.inf)
    for rules in (positive(cfg, "width"), not_negative(cfg, "width")):
        assert [found.rule for found in violations(cfg, *rules)] == ["must be finite"]


def test_an_integer_that_no_tensor_can_count_is_refused():
    cfg = unset(Outer, width=10**30)
    (found,) = violations(cfg, *positive(cfg, "width"))
    assert found.rule == "must be at most 9223372036854775807"


def test_require_raises_all_or_nothing():
    require([])
    with pytest.raises(ConfigError) as error:
        require([problem("a"), problem("b")])
    assert [found.key for found in error.value.problems] == ["a", "b"]


def test_the_report_counts_and_numbers_problems():
    text = report([problem("a"), problem("b")])
    assert "2 problems" in text
    assert "1. a = 3" in text
    assert "2. b = 3" in text
    assert "1 problem." in report([problem()])


def test_check_reports_every_violated_rule_with_its_value():
    cfg = Outer(width=-1.0, inner=Inner(size=3))
    even = Rule("inner.size", lambda: cfg.inner.size % 2 == 0, lambda: f"{cfg.inner.size} is odd", "add 1")
    with pytest.raises(ConfigError) as error:
        check(cfg, even, *not_negative(cfg, "width"), Rule("width", lambda: True, "never", "never"))
    assert [(found.key, found.value) for found in error.value.problems] == [("inner.size", 3), ("width", -1.0)]
    assert error.value.problems[0].rule == "3 is odd"


def test_a_rule_about_an_unset_field_is_skipped_and_the_others_speak():
    cfg = unset(Outer, width=-1.0, inner=unset(Inner))
    rules = [
        *positive(cfg.inner, "size"),
        Rule("inner.size", lambda: cfg.inner.size > 0, "r", "f"),
        *positive(cfg, "width"),
    ]
    assert [found.key for found in violations(cfg, *rules)] == ["width"]


def test_a_rule_that_reads_what_does_not_exist_is_a_mistake_of_ours():
    cfg = Outer(width=1.0, inner=Inner(size=3))
    with pytest.raises(AttributeError):
        violations(cfg, Rule("width", lambda: cfg.widt > 0, "r", "f"))


def test_a_finder_that_reads_an_unset_field_is_skipped_and_the_others_speak():
    def size(cfg: Outer) -> list[Problem]:
        return [Problem(key="size", value=cfg.inner.size, rule="r", fix="f")]

    def width(cfg: Outer) -> list[Problem]:
        return [Problem(key="width", value=cfg.width, rule="r", fix="f")]

    assert [found.key for found in findings(unset(Outer, width=1.0), size, width)] == ["width"]
    complete = Outer(width=1.0, inner=Inner(size=3))
    assert [found.key for found in findings(complete, size, width)] == ["size", "width"]
    with pytest.raises(AttributeError):
        findings(complete, lambda cfg: [cfg.nothing])


def test_is_complete_looks_inside_mappings():
    assert is_complete({"a": Inner(size=3)})
    assert not is_complete({"a": Inner(size=3), "b": unset(Inner)})


def test_is_complete_looks_inside():
    assert is_complete(Outer(width=1.0, inner=Inner(size=3)))
    assert not is_complete(Outer(width=1.0, inner=unset(Inner)))
    assert not is_complete(unset(Outer, inner=Inner(size=3)))


@pytest.mark.parametrize("value", [float("nan"), -1.0])
def test_not_a_number_satisfies_no_bound(value):
    cfg = Outer(width=value, inner=Inner(size=3))
    assert len(violations(cfg, *positive(cfg, "width"), *not_negative(cfg, "width"))) == 2


def test_zero_is_not_positive_and_not_negative():
    cfg = Outer(width=0.0, inner=Inner(size=3))
    assert [found.rule for found in violations(cfg, *positive(cfg, "width"), *not_negative(cfg, "width"))] == [
        "must be positive"
    ]
