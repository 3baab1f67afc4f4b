"""Where a run stands, and what one step gave."""

from dataclasses import asdict, dataclass

from torch import Tensor

from nvfp4_train.data.batch import Batch


@dataclass(kw_only=True, slots=True)
class TrainState:
    """Progress of a run, the same on every rank and in every layout.

    Args:
        step: Optimizer steps done.
        tokens: Tokens read by them; schedules and the budget are functions of this.
        sequences: Sequences read from the present data set, its cursor. A fork onto other data starts again at 0.
    """

    step: int = 0
    tokens: int = 0
    sequences: int = 0

    def advance(self, *, num_sequences: int, sequence_length: int) -> None:
        """Count one step of ``num_sequences`` sequences."""
        self.step += 1
        self.tokens += num_sequences * sequence_length
        self.sequences += num_sequences

    def to_dict(self) -> dict[str, int]:
        """Return the counters by name, as a checkpoint keeps them."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one step gave. The tensors stay on the device: nobody has waited for them yet.

    Args:
        loss: Mean cross-entropy of the step's labels over all ranks, FP32 scalar.
        grad_norm: Global gradient norm before clipping, FP32 scalar; where it is not finite the weights did not change.
        lr: Learning rate of the step.
        denominator: Number of labels over all ranks, scalar.
        batches: This rank's microbatches.
    """

    loss: Tensor
    grad_norm: Tensor
    lr: float
    denominator: Tensor
    batches: list[Batch]
