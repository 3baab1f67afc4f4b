"""Records a window of steps with the torch profiler."""

from pathlib import Path
from typing import TYPE_CHECKING

from torch.profiler import profile

from nvfp4_train.config.logging import ProfileConfig
from nvfp4_train.train.callback import Callback
from nvfp4_train.train.state import StepResult

if TYPE_CHECKING:
    from nvfp4_train.train.trainer import Trainer

NUM_TABLE_ROWS = 40


class Profiler(Callback):
    """Profiles ``num_steps`` steps, after ``start_step`` steps.

    Each rank writes a trace for chrome://tracing or Perfetto, and a table of operators.

    Args:
        cfg: The window.
        folder: Where traces go.
        rank: This rank, part of the file names.
    """

    def __init__(self, cfg: ProfileConfig, *, folder: Path, rank: int) -> None:
        self._cfg = cfg
        self._folder = folder
        self._rank = rank
        self._profile: profile | None = None

    def run_started(self, trainer: "Trainer") -> None:
        """Open the window, if it starts here."""
        self._open_if_due(trainer)

    def step_ended(self, trainer: "Trainer", result: StepResult) -> None:
        """Open or close the window."""
        if self._profile is not None and trainer.state.step == self._cfg.start_step + self._cfg.num_steps:
            self._close()
        self._open_if_due(trainer)

    def run_ended(self, trainer: "Trainer") -> None:
        """Close a window that reaches past the end."""
        if self._profile is not None:
            self._close()

    def _open_if_due(self, trainer: "Trainer") -> None:
        if trainer.state.step == self._cfg.start_step:
            self._profile = profile()
            self._profile.start()

    def _close(self) -> None:
        assert self._profile is not None
        self._profile.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self._folder / f"rank_{self._rank}.trace.json.gz"))
        table = self._profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=NUM_TABLE_ROWS)
        (self._folder / f"rank_{self._rank}.txt").write_text(table + "\n", encoding="utf-8")
        self._profile = None
