"""Where DeepSpeed is installed, and its state put together."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from torch import Tensor

from nvfp4_train.checkpoint.state import State
from nvfp4_train.checkpoint.zero_files import read_state
from nvfp4_train.engine.deepspeed_engine import DeepSpeedEngine

needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="DeepSpeed is not installed (pip install 'nvfp4-train[deepspeed]')"
)


def flat(state: State) -> dict[str, Tensor]:
    """Name every tensor of a state."""
    tensors = {name: tensor.clone() for name, tensor in state["model"].items()}
    for name, values in state["optimizer"].items():
        tensors |= {f"{name}/{key}": value.clone() for key, value in values.items()}
    return tensors


def whole_state(engine: DeepSpeedEngine, path: Path) -> dict[str, Tensor]:
    """What the engine saves to `path`; all ranks must call it."""
    engine.save(path, {})
    return flat(read_state(path))
