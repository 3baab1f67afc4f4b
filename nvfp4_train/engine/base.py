"""What a trainer needs from an engine, and what all engines do alike."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nvfp4_train.data.batch import Batch
from nvfp4_train.model.hybrid import HybridLM
from nvfp4_train.model.router import balance_experts
from nvfp4_train.parallel.context import cut_rows, stream_rows
from nvfp4_train.parallel.mesh import Mesh
from nvfp4_train.precision.amax_history import end_step
from nvfp4_train.precision.coverage import PrecisionPlan
from nvfp4_train.precision.high_precision import high_precision


class Forward(StrEnum):
    """How an evaluation computes."""

    recipe = "recipe"  # as training does
    bf16 = "bf16"  # in the compute dtype, nothing quantized


@dataclass(frozen=True, kw_only=True)
class LossSum:
    """A loss before its division, over all ranks.

    Args:
        loss_sum: FP32 scalar, sum of the cross-entropy over the counted labels.
        num_labels: int64 scalar, number of those labels.
    """

    loss_sum: Tensor
    num_labels: Tensor


class Engine(Protocol):
    """Runs steps on the devices.

    All ranks call every method, in the same order; none but `save` and `load` waits for a device.

    Attributes:
        mesh: Of all ranks.
        step: Optimizer steps taken, skipped ones included.
        extra_losses: What the model reports beside the loss, of the newest step: mean over labels of all ranks by name
            (``mtp_1``, ``router``), FP32 scalars on the device. Empty for a model that reports nothing.
    """

    mesh: Mesh
    step: int
    extra_losses: dict[str, Tensor]

    @property
    def model(self) -> nn.Module:
        """The model after all passes; names of its parameters are checkpoint names."""
        ...

    def forward_backward(self, batches: list[Batch], denominator: Tensor) -> Tensor:
        """Add up the gradients of one step.

        Args:
            batches: This rank's microbatches, at least one and as many on every rank; on any device.
            denominator: FP32 scalar, counted labels in the microbatches of all ranks together; the same everywhere.

        Returns:
            FP32 scalar on the device: the sum of the cross-entropy over all ranks, divided by `denominator`.
        """
        ...

    def optimizer_step(self, *, lr: float, weight_decay: float) -> Tensor:
        """Clip the gradients, update the parameters and forget the gradients.

        Args:
            lr: Learning rate of this step.
            weight_decay: Weight decay of this step.

        Returns:
            FP32 scalar on the device: the global gradient norm before clipping, equal on all ranks. Where it is not
            finite, parameters and optimizer state are left as they were, on every rank, and the step counts all the
            same.
        """
        ...

    def evaluate(self, batch: Batch, *, forward: Forward) -> LossSum:
        """Take the loss of one microbatch per rank, without gradients, from the present weights."""
        ...

    def save(self, path: Path, metadata: dict[str, Any]) -> None:
        """Save masters, optimizer state and `metadata` (plain JSON values) to the folder `path`.

        Raises:
            CheckpointError: on every rank, if any rank could not write; checkpoints that exist stay usable.
        """
        ...

    def load(self, path: Path) -> dict[str, Any]:
        """Continue from a checkpoint, saved by any number of ranks, and return the `metadata` it was saved with.

        Raises:
            CheckpointError: if it is incomplete, or its tensors are not those of this model and optimizer.
        """
        ...

    def close(self) -> None:
        """Free what steps hold; the process group belongs to the caller."""
        ...


class BaseEngine(ABC):
    """What the engines do alike: the position of a microbatch, an evaluation, the end of a step.

    Args:
        model: What this rank has of it after the parallel pass, with values.
        optimizer: Over its parameters.
        mesh: Of all ranks.
        plan: Of the precision pass: the position of its QuantizedLinears, moved by this engine only, and what the
            recipe does after an optimizer step.
    """

    def __init__(self, model: HybridLM, *, optimizer: Optimizer, mesh: Mesh, plan: PrecisionPlan) -> None:
        self.model = model
        self.mesh = mesh
        self.step = 0
        self.extra_losses: dict[str, Tensor] = {}
        self._optimizer = optimizer
        self._position = plan.position
        self._after_step = plan.after_step

    @torch.no_grad()
    def evaluate(self, batch: Batch, *, forward: Forward) -> LossSum:
        """Take the loss of one microbatch per rank; see `Engine`."""
        with high_precision(self._position) if forward is Forward.bf16 else nullcontext():
            loss_sum = self._run_forward(batch)
        num_labels = batch.num_labels().to(self.mesh.device)
        return LossSum(loss_sum=self.mesh.sum_over_tokens(loss_sum), num_labels=self.mesh.sum_over_data(num_labels))

    @abstractmethod
    def _run_forward(self, batch: Batch) -> Tensor:
        """Return the sum of the cross-entropy over this rank's tokens."""

    def _writable_parameters(self) -> AbstractContextManager[None]:
        """Let parameters be changed inside the block, so that the masters follow."""
        return nullcontext()

    def _start(self, batch: Batch) -> Batch:
        """Move the position of all rounding to a microbatch; return it on the device, with this rank's tokens."""
        self._position.start_microbatch(step=self.step, **stream_rows(batch, mesh=self.mesh))
        here = batch.to(self.mesh.device)
        return replace(here, tokens=cut_rows(here.tokens, mesh=self.mesh), labels=cut_rows(here.labels, mesh=self.mesh))

    def _end_step(self, *, skip: Tensor) -> None:
        """Do what follows the update of the parameters; `skip` is an FP32 scalar, 1 where it was left out, else 0."""
        balance_experts(self.model, sum_over_data=self.mesh.sum_over_tokens, skip=skip)
        self.step += 1
        end_step(self.model, largest_over_ranks=self.mesh.max_over_tokens)
        if self._after_step is not None:
            with self._writable_parameters():
                self._after_step(self.model, step=self.step)
        self._position.weights_changed()
