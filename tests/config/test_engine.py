from nvfp4_train.config.engine import TorchEngineConfig
from tests.support.configs import composed, load_problems


def test_the_engine_is_chosen_by_its_type():
    assert composed("engine=torch").engine == TorchEngineConfig(reshard_after_forward=True)


def test_an_unknown_engine_lists_those_that_exist():
    assert load_problems("engine=turch")["engine"].fix == "did you mean torch? choices: torch"


def test_a_copy_of_one_rank_is_no_resharding():
    problem = load_problems("engine.reshard_size=1")["engine.reshard_size"]
    assert "at least 2" in problem.rule


def test_weights_that_are_not_freed_are_not_resharded():
    problem = load_problems("engine.reshard_size=8", "engine.reshard_after_forward=false")["engine.reshard_size"]
    assert "reshard_after_forward" in problem.rule
