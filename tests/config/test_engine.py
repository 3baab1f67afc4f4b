from dataclasses import replace

import pytest

from nvfp4_train.config.engine import TorchEngineConfig, WeightGather
from tests.support.configs import composed, load_problems, problems_of


def test_the_engine_is_chosen_by_its_type():
    assert composed("engine=torch").engine == TorchEngineConfig(
        reshard_after_forward=True, reshard_ranks=0, weight_gather=WeightGather.bf16
    )


def test_an_unknown_engine_lists_those_that_exist():
    assert load_problems("engine=turch")["engine"].fix == "did you mean torch? choices: torch"


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"reshard_ranks": -1}, "must not be negative"),
        ({"reshard_ranks": 8, "reshard_after_forward": False}, "reshard_after_forward is false"),
        ({"reshard_ranks": 8, "weight_gather": WeightGather.quantized}, "cannot stay spread over fewer ranks"),
    ],
)
def test_weights_stay_spread_only_where_they_can(changes, rule):
    (problem,) = problems_of(lambda: replace(composed("engine=torch").engine, **changes))
    assert problem.key == "reshard_ranks"
    assert rule in problem.rule


@pytest.mark.parametrize(
    ("recipe", "why"), [("mxfp8", "in two ways"), ("bf16", "is not quantized"), ("fp8_delayed", "older steps")]
)
def test_weights_travel_quantized_only_where_the_recipe_lets_them(recipe, why):
    assert why in load_problems(f"recipe={recipe}", "engine.weight_gather=quantized")["engine.weight_gather"].rule
    assert composed("recipe=nvfp4", "engine.weight_gather=quantized").engine.weight_gather is WeightGather.quantized
