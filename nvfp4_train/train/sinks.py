"""Where metric rows go."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Protocol

from torch.utils.tensorboard import SummaryWriter

from nvfp4_train.config.logging import LoggingConfig, WandbMode
from nvfp4_train.data.write import write_text
from nvfp4_train.train.run_folder import RunFolder

_WANDB_MODES: dict[WandbMode, Literal["offline", "online"]] = {
    WandbMode.offline: "offline",
    WandbMode.online: "online",
}

Row = Mapping[str, int | float]


class Sink(Protocol):
    """Takes metric rows; every row has ``step`` and ``tokens``."""

    def write(self, row: Row) -> None:
        """Take one row."""

    def close(self) -> None:
        """Finish; nothing is written afterwards."""


class JsonLines:
    """One JSON object a line; a row is on disk when ``write`` returns.

    Args:
        path: The file.
        resume_step: Step of the checkpoint that the run continues from: later rows, and a line that a kill tore, are
            dropped. None starts a new file.
    """

    def __init__(self, path: Path, *, resume_step: int | None) -> None:
        write_text(path, "" if resume_step is None else rows_until(path, step=resume_step))
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: Row) -> None:
        """Append one line."""
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def rows_until(path: Path, *, step: int) -> str:
    """Return the complete lines of a metrics file whose step is at most ``step``; nothing if there is no file.

    Raises:
        ValueError: A line other than the last is no row; nobody knows what else is missing.
    """
    if not path.exists():
        return ""
    kept = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        if not line.endswith(b"\n") or _step_of(line, where=f"{path}:{number}") > step:
            break
        kept.append(line.decode())
    return "".join(kept)


def _step_of(line: bytes, *, where: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{where}: this line is no metric row ({error})\n"
            "    expected: a JSON object with step\n"
            "    fix:      correct or remove the line; the file is not touched until then"
        ) from error


class TensorBoard:
    """TensorBoard event files.

    Args:
        folder: Where they go.
        resume_step: As for ``JsonLines``; TensorBoard hides the events of later steps.
    """

    def __init__(self, folder: Path, *, resume_step: int | None) -> None:
        self._writer = SummaryWriter(str(folder), purge_step=None if resume_step is None else resume_step + 1)

    def write(self, row: Row) -> None:
        """Add one scalar for each metric."""
        for name, value in row.items():
            if name != "step":
                self._writer.add_scalar(name, value, global_step=int(row["step"]))

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WeightsAndBiases:
    """Weights & Biases.

    Args:
        folder: The run's folder; wandb writes below it.
        name: Name of the run.
        project: Project of the run.
        mode: offline or online.

    Raises:
        ValueError: wandb is not installed.
    """

    def __init__(self, folder: Path, *, name: str, project: str, mode: WandbMode) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ValueError(
                f"logging.wandb={mode} needs the package wandb: pip install 'nvfp4-train[wandb]', or logging.wandb=off"
            ) from error
        settings = wandb.Settings(silent=True, console="off")
        self._run = wandb.init(dir=folder, project=project, name=name, mode=_WANDB_MODES[mode], settings=settings)

    def write(self, row: Row) -> None:
        """Log one row."""
        self._run.log(dict(row), step=int(row["step"]))

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def build_sinks(cfg: LoggingConfig, *, folder: RunFolder, resume_step: int | None) -> list[Sink]:
    """Open the files that metrics go to.

    Args:
        cfg: Which ones.
        folder: The run's folder.
        resume_step: Step that the run continues from; None for a new run.
    """
    sinks: list[Sink] = [JsonLines(folder.metrics, resume_step=resume_step)]
    if cfg.tensorboard:
        sinks.append(TensorBoard(folder.path / "tensorboard", resume_step=resume_step))
    if cfg.wandb is not WandbMode.off:
        sinks.append(WeightsAndBiases(folder.path, name=folder.path.name, project=cfg.wandb_project, mode=cfg.wandb))
    return sinks
