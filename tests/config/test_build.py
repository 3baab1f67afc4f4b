from copy import deepcopy

import pytest

from nvfp4_train.config.build import LEAVES, REPORTED, build_config, build_partial, known_keys, plain_values
from nvfp4_train.config.problem import NO_VALUE
from tests.support.configs import composed, problems_of


@pytest.fixture
def values() -> dict:
    return deepcopy(plain_values(composed("experiment=tiny")))


def keys_of(values: dict) -> list[str]:
    return [problem.key for problem in problems_of(lambda: build_config(values))]


@pytest.mark.parametrize(
    "overrides", [("recipe=bf16",), ("scheduler=constant",), ("data=text_files", "data.paths=[a.txt]")], ids=" ".join
)
def test_plain_values_build_an_equal_config(overrides):
    cfg = composed(*overrides)
    assert build_config(plain_values(cfg)) == cfg


def test_every_leaf_has_a_group():
    cfg = composed()
    bases = {type(getattr(cfg, group)).__mro__[-2] for group in ("data", "optimizer", "scheduler", "engine")}
    assert bases == set(LEAVES)


def test_unknown_missing_and_wrong_values_are_reported_together(values):
    values["model"]["mamba"]["num_head"] = 3
    values["zoo"] = {"lion": {"fur": 1}}
    values["recipe"]["linear"]["fprop"]["x"]["block"] = "row_1x32"
    del values["batch"]["micro_batch_size"]
    values["logging"]["profile"] = 3
    assert set(keys_of(values)) == {
        "model.mamba.num_head",
        "zoo.lion.fur",
        "recipe.linear.fprop.x.block",
        "batch.micro_batch_size",
        "logging.profile",
    }


def test_a_wrong_part_does_not_hide_what_contains_it_or_stands_beside_it(values):
    values["model"]["mamba"]["num_heads"] = "many"
    values["model"]["mamba"]["d_conv"] = 0
    values["model"]["attention"]["num_kv_heads"] = 3
    values["model"]["pattern"] = "M?"
    values["data"]["tokenizer_vocab_size"] = 1024
    assert set(keys_of(values)) == {
        "model.mamba.num_heads",
        "model.mamba.d_conv",
        "model.attention.num_heads",
        "model.pattern",
        "model.vocab_size",
    }


def test_problems_of_an_operand_come_one_by_one(values):
    values["recipe"]["linear"]["fprop"]["x"] |= {"global_scale": "none", "block_scale_max": 100, "block": "none"}
    problems = {problem.key: problem for problem in problems_of(lambda: build_config(values))}
    prefix = "recipe.linear.fprop.x"
    assert {f"{prefix}.global_scale", f"{prefix}.block_scale_max", f"{prefix}.block"} <= set(problems)
    assert problems[f"{prefix}.block"].value == "none"


def test_an_operand_problem_may_contain_the_separator(values):
    values["recipe"]["linear"]["fprop"]["x"]["hadamard_signs"] = "fixed"
    assert keys_of(values) == ["recipe.linear.fprop.x.hadamard_signs"]


def test_a_wrong_type_lists_the_leaf_classes(values):
    values["scheduler"]["type"] = "cosin"
    (problem,) = problems_of(lambda: build_config(values))
    assert (problem.key, problem.fix.split("?")[0]) == ("scheduler.type", "did you mean cosine")
    del values["scheduler"]["type"]
    assert keys_of(values) == ["scheduler.type"]


def test_a_missing_value_has_none_to_show(values):
    values["run"]["tokens"] = "???"
    (problem,) = problems_of(lambda: build_config(values))
    assert (problem.key, problem.value) == ("run.tokens", NO_VALUE)


def test_what_is_reported_already_is_not_reported_again(values):
    values["recipe"] = REPORTED
    values["model"]["d_model"] = REPORTED
    values["model"]["vocab_size"] = 0
    problems = []
    build_partial(values, problems)
    assert [problem.key for problem in problems] == [
        "model.vocab_size",
        "model.vocab_size",
    ]  # positive, and for the data


def test_operand_defaults_need_not_be_written(values):
    del values["recipe"]["linear"]["fprop"]["x"]["hadamard_size"]
    assert build_config(values) == composed("experiment=tiny")


def test_known_keys_depend_on_the_leaf_type(values):
    assert "scheduler.decay_shape" in known_keys(values)
    assert "recipe.linear.wgrad.dy.rounding" in known_keys(values)
    values["scheduler"]["type"] = "cosine"
    assert "scheduler.decay_shape" not in known_keys(values)
    assert "scheduler.min_lr" in known_keys(values)


INDEXED = (
    "data=indexed",
    "data.sources={web: {paths: [a], weight: 0.5}, code: {paths: [b], weight: 0.5}}",
    "data.phases={all: {end_fraction: 1, weights: {web: 1}}}",
    "data.validation={web: {paths: [c]}}",
)


def test_entries_with_names_of_the_user_make_the_round_trip():
    cfg = composed(*INDEXED)
    values = plain_values(cfg)
    assert values["data"]["sources"]["code"]["paths"] == ["b"]
    assert build_config(values) == cfg
    keys = known_keys(values)
    assert "data.sources.code.weight" in keys
    assert "data.phases.all.end_fraction" in keys
    assert "data.sources" not in keys


def test_every_entry_is_checked_and_a_wrong_one_hides_no_other():
    values = deepcopy(plain_values(composed(*INDEXED)))
    values["data"]["sources"]["web"]["weight"] = -1.0
    values["data"]["sources"]["code"]["pahts"] = ["x"]
    values["data"]["validation"]["web"] = ["c"]
    values["data"]["phases"]["all"]["weights"] = {"web": "much"}
    values["data"]["prefetch"] = -1
    assert set(keys_of(values)) == {
        "data.sources.web.weight",
        "data.sources.code.pahts",
        "data.validation.web",
        "data.phases.all.weights",
        "data.prefetch",
    }
