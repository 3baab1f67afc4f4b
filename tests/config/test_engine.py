from dataclasses import replace

import pytest

from nvfp4_train.config.engine import DeepSpeedEngineConfig, OffloadDevice, TorchEngineConfig, WeightGather
from tests.support.configs import composed, load_problems, problems_of
from tests.support.tiny import deepspeed_engine

CPU = OffloadDevice.cpu


def test_the_engine_is_chosen_by_its_type():
    assert composed("engine=torch").engine == TorchEngineConfig(
        reshard_after_forward=True, reshard_ranks=0, weight_gather=WeightGather.bf16
    )
    cfg = composed("engine=deepspeed", "engine.zero_stage=3").engine
    assert cfg == deepspeed_engine(3, param_persistence_threshold=None)


def test_an_unknown_engine_lists_those_that_exist():
    assert load_problems("engine=turch")["engine"].fix == "did you mean torch? choices: deepspeed, torch"


def test_a_key_of_the_other_engine_says_whose_it_is():
    assert (
        "engine=torch"
        in load_problems("engine=deepspeed", "engine.reshard_after_forward=true")["engine.reshard_after_forward"].fix
    )


@pytest.mark.parametrize(
    ("cfg", "changes", "keys"),
    [
        (deepspeed_engine(1), {"zero_stage": 0}, ["zero_stage"]),
        (deepspeed_engine(1), {"zero_stage": 4}, ["zero_stage"]),
        (deepspeed_engine(2), {"offload_param": CPU, "offload_optimizer": CPU}, ["offload_param"]),
        (deepspeed_engine(3), {"offload_param": CPU}, ["offload_param"]),
        (deepspeed_engine(3), {"allgather_bucket_size": 1000}, ["allgather_bucket_size"]),
        (deepspeed_engine(1), {"allgather_bucket_size": 1001}, ["allgather_bucket_size"]),
        (deepspeed_engine(1), {"prefetch_bucket_size": 1000}, ["prefetch_bucket_size"]),
        (deepspeed_engine(2), {"param_persistence_threshold": 0}, ["param_persistence_threshold"]),
        (deepspeed_engine(3), {"param_persistence_threshold": -1}, ["param_persistence_threshold"]),
        (deepspeed_engine(3), {"reduce_bucket_size": 0}, ["reduce_bucket_size"]),
        (
            deepspeed_engine(1),
            {"reduce_bucket_size": -1, "prefetch_bucket_size": 0},
            ["prefetch_bucket_size", "reduce_bucket_size", "prefetch_bucket_size"],
        ),
    ],
)
def test_a_violated_rule_names_its_key(cfg: DeepSpeedEngineConfig, changes, keys):
    assert [problem.key for problem in problems_of(lambda: replace(cfg, **changes))] == keys


def test_a_wrong_stage_is_reported_beside_other_problems():
    assert list(load_problems("engine=deepspeed", "engine.zero_stage=two", "engine.reduce_bucket_size=0")) == [
        "engine.zero_stage",
        "engine.reduce_bucket_size",
    ]


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
