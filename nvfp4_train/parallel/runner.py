"""Forward and backward of one step, where a rank holds the whole model; `pipeline` has its sibling for stages."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from nvfp4_train.data.batch import Batch
from nvfp4_train.model.hybrid import HybridLM
from nvfp4_train.parallel.extra_losses import ExtraLosses
from nvfp4_train.parallel.fsdp import prepare_backward, reshard

# Moves what a forward depends on to a microbatch, and returns what this rank computes of it, on its device.
StartMicrobatch = Callable[[Batch], Batch]


class Runner(Protocol):
    """Runs the microbatches of a rank; all ranks call every method, in the same order.

    Attributes:
        extra: What the model reported beside the loss in the newest step; the same names on all ranks.
    """

    extra: ExtraLosses

    def forward_backward(self, batches: Sequence[Batch], denominator: Tensor, *, start: StartMicrobatch) -> Tensor:
        """Add up the gradients of one step.

        Args:
            batches: This rank's microbatches.
            denominator: FP32 scalar that every loss is divided by.
            start: Called at the start of every forward.

        Returns:
            FP32 scalar: the sum of the cross-entropy over the tokens of this rank, not divided.
        """
        ...

    def evaluate(self, batch: Batch, *, start: StartMicrobatch) -> Tensor:
        """Return the same sum for one microbatch, without gradients."""
        ...

    def parameters_of_norm(self) -> list[nn.Parameter]:
        """Return the parameters that this rank adds to the gradient norm: every one is counted by one pipeline rank."""
        ...

    def reshard(self) -> None:
        """Free all gathered weights, so that the next forward gathers the present ones."""
        ...


class WholeModelRunner:
    """See `Runner`.

    Args:
        model: Whole, after the parallel pass.
        keeps_gathered: Whether a microbatch uses the weights that the one before it gathered.
    """

    def __init__(self, model: HybridLM, *, keeps_gathered: bool) -> None:
        self.extra = ExtraLosses()
        self._model = model
        self._keeps_gathered = keeps_gathered

    def forward_backward(self, batches: Sequence[Batch], denominator: Tensor, *, start: StartMicrobatch) -> Tensor:
        """Run one microbatch after the other; see `Runner`."""
        total = torch.zeros_like(denominator)
        self.extra = ExtraLosses()
        for index, batch in enumerate(batches):
            is_last = index == len(batches) - 1
            prepare_backward(self._model, is_last=is_last, keeps_gathered=self._keeps_gathered)
            loss_sum = self._model(**model_inputs(start(batch)))
            (loss_sum / denominator).backward()
            total += loss_sum.detach()
            self.extra.add(self._model.extra_losses)
        return total

    def evaluate(self, batch: Batch, *, start: StartMicrobatch) -> Tensor:
        """Run one forward; see `Runner`."""
        loss_sum: Tensor = self._model(**model_inputs(start(batch)))
        # Without a backward nothing else frees the gathered weights, and the next forward would use them even after a
        # load.
        self.reshard()
        return loss_sum

    def parameters_of_norm(self) -> list[nn.Parameter]:
        """Return all parameters."""
        return list(self._model.parameters())

    def reshard(self) -> None:
        """Free all gathered weights."""
        reshard(self._model)


def model_inputs(batch: Batch) -> dict[str, Tensor]:
    """Return what a model reads of a batch, by argument."""
    return {
        "tokens": batch.tokens,
        "document_ids": batch.document_ids,
        "position_ids": batch.position_ids,
        "labels": batch.labels,
    }
