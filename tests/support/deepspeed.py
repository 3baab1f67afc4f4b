"""Where DeepSpeed is installed, its state put together, and what its ranks send each other."""

from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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


class RecordedGathers(TorchDispatchMode):
    """While it is active, counts the elements that this rank gets from all-gathers, its own included.

    Attributes:
        elements: By dtype.
    """

    def __init__(self) -> None:
        super().__init__()
        self.elements: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.c10d._allgather_base_.default:
            whole = args[0]
            self.elements[whole.dtype] += whole.numel()
        return func(*args, **(kwargs or {}))
