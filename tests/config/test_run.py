from dataclasses import replace

import pytest

from tests.support.configs import composed, problems_of

VALID = composed().run


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"name": ""}, "name"),
        ({"name": "a/b"}, "name"),
        ({"name": ".."}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"dir": ""}, "dir"),
        ({"seed": -1}, "seed"),
        ({"tokens": 0}, "tokens"),
        ({"stop_after_steps": 0}, "stop_after_steps"),
    ],
)
def test_a_violated_rule_names_its_key(changes, key):
    assert [problem.key for problem in problems_of(lambda: replace(VALID, **changes))] == [key]
