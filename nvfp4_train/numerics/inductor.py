"""The twin for GPUs: the PyTorch functions of the oracle, compiled by Inductor to one kernel where eager runs dozens.

Not run on a GPU yet. On a CPU, where the C++ kernels are the faster twin, tests hold Inductor's code to the oracle's
bits.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

# What keeps the bits of eager code: IEEE division, no flush of subnormal numbers to zero, and a rounding wherever the
# source casts to BF16 and back.
OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {
    "eager_numerics.division_rounding": True,
    "eager_numerics.disable_ftz": True,
    "emulate_precision_casts": True,
}


def uses_inductor(x: Tensor) -> bool:
    """Say whether functions on x are compiled: on a GPU, unless a compiler is already at work around them."""
    return x.is_cuda and not torch.compiler.is_compiling()


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` compiled as one graph for each shape and spec that it meets, with the bits of eager code."""
    return torch.compile(function, fullgraph=True, dynamic=False, options=OPTIONS)
