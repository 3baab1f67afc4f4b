from dataclasses import replace

import pytest

from nvfp4_train.config.batch import BatchConfig, RampConfig
from tests.support.configs import problems_of

VALID = BatchConfig(
    sequence_length=8, micro_batch_size=2, global_batch_size=8, ramp=RampConfig(start=2, increment=2, tokens=64)
)


def test_tokens_of_a_step():
    assert VALID.tokens == 64


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"sequence_length": 0}, ["sequence_length"]),
        ({"micro_batch_size": 0}, ["micro_batch_size"]),
        ({"global_batch_size": 0}, ["global_batch_size", "ramp.start"]),
        ({"global_batch_size": 9}, ["global_batch_size", "ramp.increment"]),
        ({"ramp": RampConfig(start=3, increment=1, tokens=64)}, ["ramp.start", "ramp.increment"]),
        ({"ramp": RampConfig(start=10, increment=2, tokens=64)}, ["ramp.start"]),
        ({"ramp": RampConfig(start=4, increment=6, tokens=64)}, ["ramp.increment"]),
    ],
)
def test_a_violated_rule_names_its_key(changes, keys):
    assert [problem.key for problem in problems_of(lambda: replace(VALID, **changes))] == keys


def test_several_violated_rules_are_reported_together():
    problems = problems_of(lambda: replace(VALID, sequence_length=0, global_batch_size=-3))
    assert {"sequence_length", "global_batch_size"} <= {problem.key for problem in problems}


def test_without_a_ramp_its_sizes_mean_nothing():
    off = RampConfig(start=0, increment=0, tokens=0)
    assert replace(VALID, ramp=off).ramp == off


@pytest.mark.parametrize("sizes", [{"start": 0, "increment": 2}, {"start": 2, "increment": -2}])
def test_the_sizes_of_a_ramp_are_positive(sizes):
    (problem,) = problems_of(lambda: RampConfig(**sizes, tokens=64))
    assert sizes[problem.key] <= 0


def test_a_ramp_is_not_negative():
    assert [problem.key for problem in problems_of(lambda: RampConfig(start=2, increment=2, tokens=-1))] == [
        "tokens",
    ]
