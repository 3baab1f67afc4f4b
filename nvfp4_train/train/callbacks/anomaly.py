"""Stops a run whose numbers are no longer numbers."""

import math
from typing import TYPE_CHECKING

from nvfp4_train.train.anomaly import NonFiniteError, describe_cause
from nvfp4_train.train.callback import Callback
from nvfp4_train.train.evaluate import ValidationLosses
from nvfp4_train.train.metrics import read_step
from nvfp4_train.train.state import StepResult

if TYPE_CHECKING:
    from nvfp4_train.train.trainer import Trainer


class StopOnNonFinite(Callback):
    """Raises when a loss or gradient norm is NaN or infinite.

    It comes first, so that no such step is logged or saved.
    """

    def step_ended(self, trainer: "Trainer", result: StepResult) -> None:
        """Check the step's loss and gradient norm.

        Raises:
            NonFiniteError: naming the layer and operand that is not finite.
        """
        values = read_step(result)
        if math.isfinite(values.loss) and math.isfinite(values.grad_norm):
            return
        found = f"training loss {values.loss}, gradient norm {values.grad_norm}"
        cause = describe_cause(trainer.engine, result.batches)
        raise NonFiniteError(f"step {trainer.state.step}: {found}\n    {cause}\n    {_ADVICE}")

    def evaluation_ended(self, trainer: "Trainer", losses: ValidationLosses) -> None:
        """Check the validation losses.

        Raises:
            NonFiniteError: naming the layer and operand that is not finite.
        """
        if math.isfinite(losses.recipe) and math.isfinite(losses.bf16):
            return
        found = f"validation loss {losses.recipe}, in BF16 {losses.bf16}"
        cause = describe_cause(trainer.engine, trainer.evaluation.batches())
        raise NonFiniteError(f"after step {trainer.state.step}: {found}\n    {cause}\n    {_ADVICE}")


_ADVICE = "nothing of this step is in the metrics or in a checkpoint"
