"""Gradients of weights that wait, so that a backward has the gradients of its inputs sooner."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from nvfp4_train.precision.experts import QuantizedExperts
from nvfp4_train.precision.linear import QuantizedLinear

_Waiting = list[tuple[Tensor, Callable[[], Tensor]]]


class DeferredGradients:
    """Collects the wgrad GEMMs of the backwards of a model, for a caller that runs them when it has the time.

    What waits holds the two operands, packed where the recipe quantizes them. The gradients of everything but the
    weights of Linears and experts are computed as ever: they are no GEMMs.

    Args:
        model: Its QuantizedLinears and QuantizedExperts defer from now on.
    """

    def __init__(self, model: nn.Module) -> None:
        self._waiting: _Waiting = []
        for module in model.modules():
            if isinstance(module, QuantizedLinear | QuantizedExperts):
                module.defer_gradient = self._defer

    def take(self) -> Callable[[], None]:
        """Return what computes the gradients that wait now, once, and adds them up; they wait here no longer."""
        waiting, self._waiting = self._waiting, []
        return partial(_add_up, waiting)

    def _defer(self, weight: Tensor, compute: Callable[[], Tensor]) -> None:
        self._waiting.append((weight, compute))


def _add_up(waiting: _Waiting) -> None:
    """Add each gradient where autograd would have, and those of a weight that is used twice in the order it would."""
    totals: dict[int, tuple[Tensor, Tensor]] = {}
    last_uses = {id(weight): index for index, (weight, _) in enumerate(waiting)}
    for index in range(len(waiting)):
        weight, compute = waiting[index]
        with torch.no_grad():
            gradient = compute()
        del compute
        waiting[index] = (weight, _spent)  # free the operands
        if id(weight) in totals:
            gradient = totals.pop(id(weight))[1] + gradient
        if last_uses[id(weight)] == index:
            torch.autograd.backward([weight], [gradient])
        else:
            totals[id(weight)] = (weight, gradient)


def _spent() -> Tensor:
    raise AssertionError("a deferred gradient is computed once")
