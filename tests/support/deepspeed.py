"""Where DeepSpeed is installed, and its state put together."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from torch import Tensor

from nvfp4_train.checkpoint.zero_files import read_header, read_parameters
from nvfp4_train.engine.deepspeed_engine import DeepSpeedEngine

needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="DeepSpeed is not installed (pip install 'nvfp4-train[deepspeed]')"
)


def saved_state(path: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, by name."""
    header = read_header(path)
    found = dict(header.common)
    for name, tensors in read_parameters(path, header):
        found |= {f"{name}/{key}": tensor for key, tensor in tensors.items()}
    return found


def whole_state(engine: DeepSpeedEngine, path: Path) -> dict[str, Tensor]:
    """What the engine saves to `path`; all ranks must call it."""
    engine.save(path, {})
    return saved_state(path)
