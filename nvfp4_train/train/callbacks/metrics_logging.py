"""Writes the metric rows."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nvfp4_train.precision.memory import saved_bytes
from nvfp4_train.train.callback import Callback
from nvfp4_train.train.evaluate import ValidationLosses
from nvfp4_train.train.metrics import Throughput, read_step
from nvfp4_train.train.sinks import Sink
from nvfp4_train.train.state import StepResult, TrainState

if TYPE_CHECKING:
    from nvfp4_train.train.trainer import Trainer


class MetricsLogging(Callback):
    """Writes a row every ``interval_steps`` steps, and for every evaluation.

    The row before step 0 has validation losses only: nothing was trained yet.

    Args:
        sinks: Where rows go; none on ranks other than 0.
        interval_steps: Steps between rows.
    """

    def __init__(self, sinks: Sequence[Sink], *, interval_steps: int) -> None:
        self._sinks = sinks
        self._interval_steps = interval_steps
        self._losses: ValidationLosses | None = None

    def evaluation_ended(self, trainer: "Trainer", losses: ValidationLosses) -> None:
        """Keep the losses for the row of this step."""
        self._losses = losses

    def run_started(self, trainer: "Trainer") -> None:
        """Write the row before step 0."""
        self._throughput = Throughput(tokens=trainer.state.tokens, stopwatch=trainer.stopwatch)
        if self._losses is not None:
            self._write(trainer.state, {})

    def step_ended(self, trainer: "Trainer", result: StepResult) -> None:
        """Write the row of this step, if one is due."""
        state = trainer.state
        if state.step % self._interval_steps and self._losses is None and not trainer.pace.is_over(state):
            return
        values = read_step(result)
        row = {
            "train/loss": values.loss,
            "train/grad_norm": values.grad_norm,
            "lr": result.lr,
            "tokens_per_second": self._throughput.lap(state),
            **trainer.data.metrics(state.sequences),
            "precision/memory": saved_bytes(trainer.engine.model),
        }
        self._write(state, row)

    def _write(self, state: TrainState, row: dict[str, float]) -> None:
        full: dict[str, int | float] = {"step": state.step, "tokens": state.tokens, **row}
        if self._losses is not None:
            full |= self._losses.metrics()
            self._losses = None
        for sink in self._sinks:
            sink.write(full)
