"""What a trainer needs from an engine."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from nvfp4_train.data.batch import Batch
from nvfp4_train.parallel.mesh import Mesh


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
