"""Leaves in good order when the system or the user asks."""

import signal
from types import FrameType
from typing import TYPE_CHECKING, Any

from nvfp4_train.train.callback import Callback
from nvfp4_train.train.metrics import is_true_on_any_rank
from nvfp4_train.train.state import StepResult

if TYPE_CHECKING:
    from nvfp4_train.train.trainer import Trainer

HANDLED = (signal.SIGINT, signal.SIGTERM)


class StopSignals(Callback):
    """Turns the first SIGINT or SIGTERM into a stop after the present step, on every rank.

    A second one ends the process at once. It comes last, so that the handlers stay until the last checkpoint is saved.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def run_started(self, trainer: "Trainer") -> None:
        """Take over the signals."""
        for number in HANDLED:
            self._previous[number] = signal.signal(number, self._receive)

    def step_ended(self, trainer: "Trainer", result: StepResult) -> None:
        """Stop, if any rank was asked to."""
        if is_true_on_any_rank(flag=self.received is not None, mesh=trainer.engine.mesh):
            trainer.stop(f"asked to stop by {self.received.name if self.received else 'a signal to another rank'}")

    def run_ended(self, trainer: "Trainer") -> None:
        """Give the signals back: the run is saved."""
        self.restore()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self.restore()

    def restore(self) -> None:
        """Give the signals back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
