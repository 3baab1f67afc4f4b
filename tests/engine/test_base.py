from nvfp4_train.engine.base import Engine, Forward
from nvfp4_train.engine.torch_engine import TorchEngine


def test_the_torch_engine_has_every_method_of_the_protocol():
    methods = {name for name, value in vars(Engine).items() if callable(value) and not name.startswith("_")}
    assert methods == {"forward_backward", "optimizer_step", "evaluate", "save", "load", "close"}
    assert all(callable(getattr(TorchEngine, name)) for name in methods)


def test_forwards_are_called_like_the_metrics():
    assert [str(forward) for forward in Forward] == ["recipe", "bf16"]
