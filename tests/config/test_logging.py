from dataclasses import replace

import pytest

from nvfp4_train.config.logging import WandbMode
from tests.support.configs import composed, problems_of

VALID = composed().logging


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"interval_steps": 0}, "interval_steps"),
        ({"wandb": WandbMode.offline, "wandb_project": ""}, "wandb_project"),
    ],
)
def test_a_violated_rule_names_its_key(changes, key):
    assert [problem.key for problem in problems_of(lambda: replace(VALID, **changes))] == [key]


def test_a_project_is_needed_only_where_wandb_is_used():
    assert replace(VALID, wandb=WandbMode.off, wandb_project="").wandb_project == ""


@pytest.mark.parametrize("key", ["start_step", "num_steps"])
def test_the_profile_window_is_not_negative(key):
    assert [problem.key for problem in problems_of(lambda: replace(VALID.profile, **{key: -1}))] == [key]
