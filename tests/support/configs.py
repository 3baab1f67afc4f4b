"""Complete configurations from the YAML tree, and what is wrong with broken ones."""

from collections.abc import Callable
from functools import cache

import pytest

from nvfp4_train.config.load import load_config
from nvfp4_train.config.problem import ConfigError, Problem
from nvfp4_train.config.train import TrainConfig


@cache
def composed(*overrides: str) -> TrainConfig:
    """Return the configuration of these overrides; shared between tests, which never change a config."""
    return load_config(list(overrides)).cfg


def problems_of(action: Callable[[], object]) -> list[Problem]:
    """Return the problems that ``action`` raises."""
    with pytest.raises(ConfigError) as error:
        action()
    return error.value.problems


def load_problems(*overrides: str) -> dict[str, Problem]:
    """Return what is wrong with these overrides, by key."""
    return {problem.key: problem for problem in problems_of(lambda: load_config(list(overrides)))}
