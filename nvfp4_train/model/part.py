"""How a process that holds a part of a parameter computes with it."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _keep_gradient(parameter: Tensor) -> Callable[[Tensor], Tensor]:  # noqa: ARG001 - a plain parameter's is plain
    return _itself


@dataclass(frozen=True)
class ParameterPart:
    """What lies between a parameter and the tensor that is computed with; without ranks, nothing.

    Autograd would round an FP32 gradient to the dtype of a BF16 part on its way to the parameter, so functions with
    gradients of their own take the parameter and use this inside.

    Args:
        local: From a parameter to the part that is held here.
        gradient: From a parameter to what turns the gradient of its part into its own.
    """

    local: Callable[[Tensor], Tensor] = _itself
    gradient: Callable[[Tensor], Callable[[Tensor], Tensor]] = _keep_gradient


WHOLE = ParameterPart()
