from nvfp4_train.config.engine import TorchEngineConfig
from tests.support.configs import composed, load_problems


def test_the_engine_is_chosen_by_its_type():
    assert composed("engine=torch").engine == TorchEngineConfig(reshard_after_forward=True)


def test_an_unknown_engine_lists_those_that_exist():
    assert load_problems("engine=turch")["engine"].fix == "did you mean torch? choices: torch"
