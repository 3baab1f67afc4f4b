"""The training loop."""

from collections.abc import Sequence

from nvfp4_train.data.build import TrainingData
from nvfp4_train.engine.base import Engine
from nvfp4_train.train.callback import Callback
from nvfp4_train.train.evaluate import Evaluation
from nvfp4_train.train.metrics import Stopwatch, count_labels
from nvfp4_train.train.pace import Pace
from nvfp4_train.train.state import StepResult, TrainState


class Trainer:
    """Runs steps until the budget is used up or somebody asks to stop.

    Args:
        engine: Runs a step on the devices.
        data: Gives the microbatches of a step.
        evaluation: Takes the validation losses.
        pace: Says what the next step looks like.
        state: Where the run stands; advanced in place.
        callbacks: Told about everything that happens, in this order.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        data: TrainingData,
        evaluation: Evaluation,
        pace: Pace,
        state: TrainState,
        callbacks: Sequence[Callback],
    ) -> None:
        self.engine = engine
        self.data = data
        self.evaluation = evaluation
        self.pace = pace
        self.state = state
        self.callbacks = callbacks
        self.stopwatch = Stopwatch()
        self.stop_reason: str | None = None

    def fit(self, *, evaluate_first: bool) -> None:
        """Run the whole training.

        Args:
            evaluate_first: Whether the weights that the run starts from are evaluated.
        """
        if evaluate_first:
            self.evaluate()
        for callback in self.callbacks:
            callback.run_started(self)
        while not self.pace.is_over(self.state) and self.stop_reason is None:
            result = self.step()
            if self.pace.is_evaluation_due(self.state):
                self.evaluate()
            for callback in self.callbacks:
                callback.step_ended(self, result)
        for callback in self.callbacks:
            callback.run_ended(self)

    def step(self) -> StepResult:
        """Run one optimizer step."""
        num_sequences = self.pace.num_sequences(self.state)
        batches = self.data.loader.step_batches(first_sequence=self.state.sequences, num_sequences=num_sequences)
        denominator = count_labels(batches, mesh=self.engine.mesh)
        lr = self.pace.learning_rate(self.state)
        loss = self.engine.forward_backward(batches, denominator)
        grad_norm = self.engine.optimizer_step(lr=lr, weight_decay=self.pace.weight_decay(self.state))
        self.state.advance(num_sequences=num_sequences, sequence_length=self.pace.batch.sequence_length)
        return StepResult(loss=loss, grad_norm=grad_norm, lr=lr, denominator=denominator, batches=batches)

    def evaluate(self) -> None:
        """Take the validation losses of the present weights and tell the callbacks; this time is not training time."""
        with self.stopwatch.paused():
            losses = self.evaluation.run(self.engine)
        for callback in self.callbacks:
            callback.evaluation_ended(self, losses)

    def stop(self, reason: str) -> None:
        """End the run after the present step; every rank has to call this at the same step."""
        self.stop_reason = reason
