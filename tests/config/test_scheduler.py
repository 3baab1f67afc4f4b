from dataclasses import replace

import pytest

from nvfp4_train.config.scheduler import ConstantConfig, CosineConfig, InverseSqrtConfig, LinearConfig, WsdConfig
from tests.support.configs import composed, load_problems, problems_of

TYPES = {
    "wsd": WsdConfig,
    "cosine": CosineConfig,
    "linear": LinearConfig,
    "constant": ConstantConfig,
    "inverse_sqrt": InverseSqrtConfig,
}


@pytest.mark.parametrize(("name", "cls"), TYPES.items())
def test_the_schedule_is_chosen_by_its_type(name, cls):
    assert type(composed(f"scheduler={name}").scheduler) is cls


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"max_lr": 0.0}, "max_lr"),
        ({"warmup_init_lr": 1.0}, "warmup_init_lr"),
        ({"warmup_tokens": -1}, "warmup_tokens"),
    ],
)
def test_what_every_schedule_checks(name, changes, key):
    problems = problems_of(lambda: replace(composed(f"scheduler={name}").scheduler, **changes))
    assert [problem.key for problem in problems] == [key]


@pytest.mark.parametrize("name", sorted(set(TYPES) - {"constant"}))
@pytest.mark.parametrize("value", [-1.0, 1.0])
def test_schedules_that_decay_check_their_end(name, value):
    problems = problems_of(lambda: replace(composed(f"scheduler={name}").scheduler, min_lr=value))
    assert [problem.key for problem in problems] == ["min_lr"]


@pytest.mark.parametrize("fraction", [-0.1, 1.1])
def test_decay_fraction_is_a_share(fraction):
    problems = problems_of(lambda: replace(composed("scheduler=wsd").scheduler, decay_fraction=fraction))
    assert [problem.key for problem in problems] == ["decay_fraction"]


def test_a_key_of_another_schedule_says_where_it_belongs():
    problem = load_problems("scheduler=cosine", "scheduler.decay_shape=linear")["scheduler.decay_shape"]
    assert "scheduler=wsd" in problem.fix
