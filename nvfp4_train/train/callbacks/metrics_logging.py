"""Writes the metric rows."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from nvfp4_train.parallel.imbalance import expert_imbalance
from nvfp4_train.precision.memory import saved_bytes
from nvfp4_train.train.callback import Callback
from nvfp4_train.train.evaluate import ValidationLosses
from nvfp4_train.train.metrics import Throughput, largest_over_ranks, read_scalars, read_step
from nvfp4_train.train.sinks import Sink
from nvfp4_train.train.state import StepResult, TrainState
from nvfp4_train.train.utilization import Utilization

if TYPE_CHECKING:
    from nvfp4_train.train.trainer import Trainer


class MetricsLogging(Callback):
    """Writes a row every ``interval_steps`` steps, and for every evaluation.

    The row before step 0 has validation losses only: nothing was trained yet.

    Args:
        sinks: Where rows go; none on ranks other than 0.
        interval_steps: Steps between rows.
        utilization: What a throughput means for the devices.
    """

    def __init__(self, sinks: Sequence[Sink], *, interval_steps: int, utilization: Utilization) -> None:
        self._sinks = sinks
        self._interval_steps = interval_steps
        self._utilization = utilization
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
        extra = {f"train/{name}_loss": loss for name, loss in trainer.engine.extra_losses.items()}
        engine = trainer.engine
        tokens_per_second = self._throughput.lap(state)
        row = {
            "train/loss": values.loss,
            **read_scalars(extra),
            "train/grad_norm": values.grad_norm,
            "lr": result.lr,
            "tokens_per_second": tokens_per_second,
            **self._utilization.metrics(tokens_per_second),
            **_read_imbalance(expert_imbalance(engine.model, mesh=engine.mesh)),
            **trainer.data.metrics(state.sequences),
            "precision/memory": largest_over_ranks(saved_bytes(engine.model), mesh=engine.mesh),
        }
        self._write(state, row)

    def _write(self, state: TrainState, row: dict[str, float]) -> None:
        full: dict[str, int | float] = {"step": state.step, "tokens": state.tokens, **row}
        if self._losses is not None:
            full |= self._losses.metrics()
            self._losses = None
        for sink in self._sinks:
            sink.write(full)


def _read_imbalance(violations: Mapping[str, Tensor]) -> dict[str, float]:
    """Return how far the busiest expert of each layer was above the mean load, and the largest over the layers."""
    found = read_scalars(violations)
    if not found:
        return {}
    by_layer = {f"moe/{name.removesuffix('.mixer.router')}/max_violation": value for name, value in found.items()}
    return {"moe/max_violation": max(found.values()), **by_layer}
