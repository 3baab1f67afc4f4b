import math

import pytest

from nvfp4_train.config.blend import (
    PhaseConfig,
    SourceConfig,
    ValidationConfig,
    blend_problems,
    coverage_problems,
    is_weight,
)
from tests.support.configs import problems_of


def source(**changes):
    return SourceConfig(**({"paths": ["data/web"]} | changes))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"paths": []}, "paths"),
        ({"paths": ["a", ""]}, "paths"),
        ({"weight": -0.5}, "weight"),
        ({"weight": math.nan}, "weight"),
        ({"weight": math.inf}, "weight"),
        ({"tokens": -1}, "tokens"),
        ({"tokens": 5, "weight": 0.5}, "tokens"),
        ({"max_epochs": 0.0}, "max_epochs"),
        ({"max_epochs": math.nan}, "max_epochs"),
        ({"fim_rate": 1.5}, "fim_rate"),
        ({"fim_spm_rate": math.nan}, "fim_spm_rate"),
    ],
)
def test_a_violated_rule_of_a_source_names_its_key(changes, key):
    assert [problem.key for problem in problems_of(lambda: source(**changes))] == [key]


def test_validation_needs_a_path():
    assert [problem.key for problem in problems_of(lambda: ValidationConfig(paths=[]))] == ["paths"]


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({}, "end_fraction"),
        ({"end_fraction": 0.5, "end_tokens": 5}, "end_fraction"),
        ({"end_fraction": 0.0}, "end_fraction"),
        ({"end_fraction": 1.1}, "end_fraction"),
        ({"end_fraction": math.nan}, "end_fraction"),
        ({"end_tokens": 0}, "end_tokens"),
        ({"end_fraction": 1.0, "weights": {"a": 1.0}, "tokens": {"a": 5}}, "tokens"),
        ({"end_fraction": 1.0, "weights": {"a": 1.0, "b": -1.0}}, "weights"),
        ({"end_fraction": 1.0, "weights": {"a": math.nan}}, "weights"),
        ({"end_fraction": 1.0, "weights": {"a": 0.0}}, "weights"),
        ({"end_fraction": 1.0, "weights": {}}, "weights"),
        ({"end_fraction": 1.0, "tokens": {"a": -1}}, "tokens"),
    ],
)
def test_a_violated_rule_of_a_phase_names_its_key(fields, key):
    assert [problem.key for problem in problems_of(lambda: PhaseConfig(**fields))] == [key]


def test_a_phase_ends_at_a_token_of_the_run():
    assert PhaseConfig(end_fraction=0.7).end(10**12) == 7 * 10**11
    assert PhaseConfig(end_tokens=123).end(10**12) == 123


def keys(problems):
    return [problem.key for problem in problems]


@pytest.mark.parametrize(
    ("sources", "phases", "found"),
    [
        ({}, {}, ["sources"]),
        ({"a": source()}, {}, []),
        ({"a": source(weight=1.0), "b": source(weight=2.0)}, {}, []),
        ({"a": source(weight=1.0), "b": source()}, {}, ["sources"]),
        ({"a": source(weight=1.0), "b": source(tokens=5)}, {}, ["sources"]),
        ({"a": source(weight=0.0), "b": source(weight=0.0)}, {}, ["sources"]),
        # Where every phase has a blend of its own, the sources need none.
        (
            {"a": source(weight=1.0), "b": source()},
            {"all": PhaseConfig(end_fraction=1.0, weights={"a": 1.0, "b": 1.0})},
            [],
        ),
        ({"a": source()}, {"all": PhaseConfig(end_fraction=1.0, weights={"b": 1.0})}, ["phases.all"]),
        ({"a/b": source()}, {}, ["sources.a/b"]),
    ],
)
def test_sources_and_phases_must_fit(sources, phases, found):
    assert keys(blend_problems(sources, phases)) == found


def phase(**fields):
    return PhaseConfig(**fields)


@pytest.mark.parametrize(
    ("phases", "found"),
    [
        ({}, []),
        ({"a": phase(end_fraction=0.7), "b": phase(end_fraction=0.9), "c": phase(end_fraction=1.0)}, []),
        ({"a": phase(end_fraction=0.7), "b": phase(end_fraction=0.9)}, ["phases.b"]),
        ({"a": phase(end_tokens=999)}, ["phases.a"]),
        ({"a": phase(end_tokens=1001)}, []),  # ends behind the run: a longer run goes on with it
        ({"a": phase(end_fraction=0.7), "b": phase(end_tokens=600), "c": phase(end_fraction=1.0)}, ["phases.b"]),
        ({"a": phase(end_fraction=1.0, tokens={"x": 600, "y": 399})}, ["phases.a"]),
        ({"a": phase(end_fraction=1.0, tokens={"x": 600, "y": 400})}, []),
        ({"a": phase(end_fraction=0.4), "b": phase(end_fraction=1.0, tokens={"x": 600})}, []),
    ],
)
def test_phases_must_cover_the_run(phases, found):
    assert keys(coverage_problems({"x": source(), "y": source()}, phases, run_tokens=1000)) == found


def test_token_counts_of_sources_must_cover_the_run():
    counts = {"x": source(tokens=600), "y": source(tokens=399)}
    assert keys(coverage_problems(counts, {}, run_tokens=1000)) == ["sources"]
    assert coverage_problems(counts, {}, run_tokens=999) == []


def test_weights_are_finite_and_not_negative():
    assert [is_weight(value) for value in (0, 1.5, -1, math.nan, math.inf)] == [True, True, False, False, False]
