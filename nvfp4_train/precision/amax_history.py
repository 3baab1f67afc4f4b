"""Delayed scaling: the largest magnitudes of the last steps, by which a tensor is scaled before its own are known.

Source: Micikevicius et al., "FP8 Formats for Deep Learning"; the history and its maximum are Transformer Engine's.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


class AmaxHistory:
    """The amax of the last steps of each operand of one Linear that scales by them; part of a checkpoint.

    All microbatches of a step are scaled alike, and the step enters the history when it is over, so that neither the
    number of microbatches nor that of ranks matters.

    Args:
        lengths: Number of steps to keep, by name of the operand.

    Attributes:
        tensors: fp32 [length] by operand, newest step first; 0 where there was none yet.
    """

    def __init__(self, lengths: dict[str, int]) -> None:
        self.tensors = {name: torch.zeros(length) for name, length in lengths.items()}
        self.newest: dict[str, Tensor] = {}

    def scale_by(self, name: str, amax: Tensor) -> Tensor:
        """Return the amax [1] that the operand is scaled by: the largest of the history; its own before there is one.

        Transformer Engine starts with the scale 1 instead, with which small gradients become zero.
        """
        history = self.tensors[name] = self.tensors[name].to(amax.device)
        largest = history.amax().reshape(1)
        return torch.where(largest > 0, largest, amax)

    def record(self, name: str, amax: Tensor) -> None:
        """Take note of the operand's own amax [1] in a microbatch of the running step."""
        newest = self.newest.get(name)
        self.newest[name] = amax if newest is None else torch.maximum(newest, amax)

    def advance(self, name: str, amax: Tensor) -> None:
        """Put a step's amax [1] first and forget the oldest.

        One that is not finite becomes 0: its step is not applied, and must not scale the following ones.
        """
        history = self.tensors[name]
        newest = torch.where(amax.isfinite(), amax, 0.0).to(history.device)
        history.copy_(torch.cat([newest, history[:-1]]))


def named_histories(model: nn.Module) -> dict[str, Tensor]:
    """Return the history of each operand as ``<linear>.amax_history.<operand>``, for checkpoints: views, not copies."""
    return {
        f"{layer}.amax_history.{name.replace('.', '_')}": tensor
        for layer, history in _histories(model)
        for name, tensor in history.tensors.items()
    }


@torch.no_grad()
def end_step(model: nn.Module, *, largest_over_ranks: Callable[[Tensor], Tensor]) -> None:
    """Move the running step's maxima into the histories.

    Args:
        model: Its QuantizedLinears.
        largest_over_ranks: Returns the elementwise maximum of an fp32 vector over the ranks that read different
            tokens; called once, or not at all if no operand scales by a history.
    """
    # All that are kept, in the same order on every rank: a rank whose experts got no tokens saw none of theirs.
    kept = [(history, name) for _, history in _histories(model) for name in history.tensors]
    if not kept:
        return
    seen = [amax for history, _ in kept for amax in history.newest.values()]
    unseen = torch.zeros_like(seen[0]) if seen else torch.zeros(1)
    maxima = largest_over_ranks(torch.cat([history.newest.pop(name, unseen) for history, name in kept]))
    for (history, name), amax in zip(kept, maxima.split(1), strict=True):
        history.advance(name, amax)


def _histories(model: nn.Module) -> Iterable[tuple[str, AmaxHistory]]:
    for layer, module in model.named_modules():
        history = getattr(module, "amax_history", None)
        if isinstance(history, AmaxHistory):
            yield layer, history
