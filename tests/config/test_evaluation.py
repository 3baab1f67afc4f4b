from dataclasses import replace

import pytest

from tests.support.configs import composed, problems_of

VALID = composed().evaluation


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"interval_steps": -1}, "interval_steps"),
        ({"num_sequences": 0}, "num_sequences"),
    ],
)
def test_a_violated_rule_names_its_key(changes, key):
    assert [problem.key for problem in problems_of(lambda: replace(VALID, **changes))] == [key]
