"""Saves the run."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from nvfp4_train.checkpoint.retention import prune_checkpoints
from nvfp4_train.config.checkpoint import CheckpointConfig
from nvfp4_train.train.anomaly import NonFiniteError
from nvfp4_train.train.callback import Callback
from nvfp4_train.train.metrics import find_non_finite_parameter, is_true_on_any_rank
from nvfp4_train.train.state import StepResult

if TYPE_CHECKING:
    from nvfp4_train.train.trainer import Trainer


class Checkpointing(Callback):
    """Saves every ``interval_steps`` steps and at the end.

    It comes after the callbacks that may refuse a step and that log it: the rows of a saved step are on disk. Weights
    that an update has made infinite (an absurd learning rate does it) are not saved.

    Args:
        cfg: When to save, and how many checkpoints stay.
        folder: Where checkpoints go.
        metadata: What every checkpoint records besides the progress in training and data.
        start_step: Step that the run starts from.
    """

    def __init__(self, cfg: CheckpointConfig, *, folder: Path, metadata: Mapping[str, object], start_step: int) -> None:
        self._cfg = cfg
        self._folder = folder
        self._metadata = metadata
        self._saved_step = start_step

    def step_ended(self, trainer: "Trainer", result: StepResult) -> None:
        """Save, if it is due."""
        if self._cfg.interval_steps and trainer.state.step % self._cfg.interval_steps == 0:
            self._save(trainer)

    def run_ended(self, trainer: "Trainer") -> None:
        """Save the end of the run."""
        if trainer.state.step != self._saved_step:
            self._save(trainer)

    def _save(self, trainer: "Trainer") -> None:
        poisoned = find_non_finite_parameter(trainer.engine.model)
        if is_true_on_any_rank(flag=poisoned is not None, mesh=trainer.engine.mesh):
            where = poisoned or "a parameter on another rank"
            raise NonFiniteError(f"step {trainer.state.step}: {where} is not finite after the update; it is not saved")
        with trainer.stopwatch.paused():
            path = self._folder / f"step_{trainer.state.step:08d}"
            data = trainer.data.state(trainer.state.sequences)
            trainer.engine.save(path, {**self._metadata, "train_state": trainer.state.to_dict(), "data": data})
            prune_checkpoints(self._folder, keep_last=self._cfg.keep_last)
        self._saved_step = trainer.state.step
