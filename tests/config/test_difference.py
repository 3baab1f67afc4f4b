from copy import deepcopy
from fnmatch import fnmatchcase
from functools import reduce
from operator import getitem

import pytest

from nvfp4_train.config.build import known_keys, plain_values
from nvfp4_train.config.difference import (
    MAY_CHANGE_ON_CONTINUE,
    MAY_CHANGE_ON_FORK,
    Difference,
    config_difference,
    flatten,
    refused_differences,
)
from nvfp4_train.config.load import load_yaml, to_yaml
from nvfp4_train.config.train import ResumeMode
from tests.support.configs import composed

CONTINUE, FORK = ResumeMode["continue"], ResumeMode.fork


OLD = plain_values(composed("experiment=tiny"))
INDEXED = plain_values(
    composed(
        "data=indexed",
        "data.sources={a: {paths: [a]}}",
        "data.phases={all: {end_fraction: 1}}",
        "data.validation={b: {paths: [b]}}",
    )
)


def difference(changes: dict[str, object]) -> list[Difference]:
    """What differs where these keys have other values."""
    new = deepcopy(OLD)
    for key, value in changes.items():
        *groups, name = key.split(".")
        parent = reduce(getitem, groups, new)
        assert parent[name] != value
        parent[name] = value
    return config_difference(OLD, new)


def test_equal_configs_do_not_differ():
    assert difference({}) == []


def test_differences_have_both_values():
    found = difference({"recipe.keep_bf16.modules": [], "run.tokens": 40960})
    assert found == [
        Difference(key="run.tokens", old=20480, new=40960),
        Difference(key="recipe.keep_bf16.modules", old=["lm_head"], new=[]),
    ]
    assert str(found[0]) == "run.tokens: 20480 -> 40960"


def test_a_key_that_one_side_lacks_is_a_difference():
    new = load_yaml(to_yaml(composed("experiment=tiny", "scheduler=constant")))
    keys = {found.key: (found.old, found.new) for found in config_difference(OLD, new)}
    assert keys["scheduler.type"] == ("wsd", "constant")
    assert keys["scheduler.decay_shape"] == ("linear", None)


@pytest.mark.parametrize(
    ("key", "value", "refused_by"),
    [
        ("logging.interval_steps", 7, set()),
        ("logging.profile.num_steps", 3, set()),
        ("checkpoint.interval_steps", 7, set()),
        ("evaluation.interval_steps", 7, set()),
        ("run.stop_after_steps", 3, set()),
        ("run.tokens", 40960, set()),
        ("data.prefetch", 0, set()),
        ("parallel.dp_shard_degree", 2, set()),
        ("batch.micro_batch_size", 2, set()),
        ("engine.reshard_after_forward", False, set()),
        ("run.seed", 5, {CONTINUE}),
        ("batch.global_batch_size", 16, {CONTINUE}),
        ("batch.sequence_length", 128, {CONTINUE}),
        ("recipe.name", "bf16", {CONTINUE}),
        ("scheduler.max_lr", 1e-3, {CONTINUE}),
        ("optimizer.beta2", 0.99, {CONTINUE}),
        ("data.validation_fraction", 0.1, {CONTINUE}),
        ("model.d_model", 128, {CONTINUE, FORK}),
        ("model.pattern", "MM", {CONTINUE, FORK}),
    ],
)
def test_what_a_resumed_run_may_change(key, value, refused_by):
    differences = difference({key: value})
    assert {mode for mode in ResumeMode if refused_differences(differences, mode=mode)} == refused_by


def test_only_the_wrong_differences_are_refused():
    refused = refused_differences(difference({"run.tokens": 40960, "run.seed": 5}), mode=CONTINUE)
    assert [found.key for found in refused] == ["run.seed"]


@pytest.mark.parametrize("glob", MAY_CHANGE_ON_FORK)
def test_every_glob_names_a_key(glob):
    assert any(fnmatchcase(key, glob) for key in known_keys(OLD) + known_keys(INDEXED))


def test_a_blend_is_left_to_the_data_and_a_new_phase_may_have_other_ones():
    new = deepcopy(INDEXED)
    new["data"]["sources"]["c"] = new["data"]["sources"]["a"] | {"weight": 0.5}
    new["data"]["on_change"] = "new_phase"
    assert refused_differences(config_difference(INDEXED, new), mode=CONTINUE) == []
    new["data"]["packing"] = "best_fit"
    new["batch"]["sequence_length"] = 1024
    differences = config_difference(INDEXED, new)
    refused = [item.key for item in refused_differences(differences, mode=CONTINUE)]
    assert refused == ["batch.sequence_length", "data.packing"]
    assert refused_differences(differences, mode=CONTINUE, new_phase=True) == []
    new["run"]["seed"] += 1
    new["optimizer"]["beta1"] = 0.5
    differences = config_difference(INDEXED, new)
    refused = [item.key for item in refused_differences(differences, mode=CONTINUE, new_phase=True)]
    assert refused == ["run.seed", "optimizer.beta1"]


def test_what_a_run_may_change_a_fork_may_change_too():
    assert set(MAY_CHANGE_ON_CONTINUE) < set(MAY_CHANGE_ON_FORK)


def test_lists_are_values():
    assert flatten({"a": {"b": [1, 2], "c": {"d": None}}}) == {"a.b": [1, 2], "a.c.d": None}
