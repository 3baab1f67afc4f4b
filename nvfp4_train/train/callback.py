"""What may happen around a step."""

from typing import TYPE_CHECKING

from nvfp4_train.train.evaluate import ValidationLosses
from nvfp4_train.train.state import StepResult

if TYPE_CHECKING:
    from nvfp4_train.train.trainer import Trainer


class Callback:
    """Reacts to a run; each method does nothing by default.

    A trainer calls its callbacks in order, on every rank. One that raises ends the run without a further checkpoint.
    """

    def run_started(self, trainer: "Trainer") -> None:
        """Called once, before the first step and after the evaluation that precedes step 0."""

    def evaluation_ended(self, trainer: "Trainer", losses: ValidationLosses) -> None:
        """Called when the weights at ``trainer.state`` were evaluated, before ``step_ended`` of the same step."""

    def step_ended(self, trainer: "Trainer", result: StepResult) -> None:
        """Called after each step; ``trainer.state`` already counts it."""

    def run_ended(self, trainer: "Trainer") -> None:
        """Called once, when the run ends well: budget used up or stopped on request."""
