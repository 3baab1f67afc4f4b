"""What the next step looks like and when a run ends: pure functions of the tokens seen."""

from dataclasses import dataclass

from nvfp4_train.config.batch import BatchConfig
from nvfp4_train.config.optimizer import OptimizerConfig
from nvfp4_train.config.run import RunConfig
from nvfp4_train.config.scheduler import SchedulerConfig
from nvfp4_train.optim.schedule import global_batch_size, learning_rate, weight_decay
from nvfp4_train.train.state import TrainState


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """Batch size, learning rate, weight decay, evaluations and the end of a run.

    Args:
        run: The budget.
        batch: Batch sizes.
        scheduler: The learning-rate schedule.
        optimizer: Its weight decay.
        evaluation_interval: Steps between evaluations; 0 evaluates at the start and the end only.
    """

    run: RunConfig
    batch: BatchConfig
    scheduler: SchedulerConfig
    optimizer: OptimizerConfig
    evaluation_interval: int

    def num_sequences(self, state: TrainState) -> int:
        """Return the number of sequences of the step that follows ``state``, over all ranks."""
        return global_batch_size(self.batch, tokens=state.tokens)

    def learning_rate(self, state: TrainState) -> float:
        """Return the learning rate of the step that follows ``state``."""
        return learning_rate(self.scheduler, tokens=state.tokens, total_tokens=self.run.tokens)

    def weight_decay(self, state: TrainState) -> float:
        """Return the weight decay of the step that follows ``state``."""
        return weight_decay(self.optimizer, tokens=state.tokens, total_tokens=self.run.tokens)

    def is_over(self, state: TrainState) -> bool:
        """Return whether no step follows ``state``."""
        stop_after = self.run.stop_after_steps
        return state.tokens >= self.run.tokens or (stop_after is not None and state.step >= stop_after)

    def is_evaluation_due(self, state: TrainState) -> bool:
        """Return whether the step that led to ``state`` is followed by an evaluation: every interval and at the end."""
        on_interval = self.evaluation_interval > 0 and state.step % self.evaluation_interval == 0
        return on_interval or self.is_over(state)
