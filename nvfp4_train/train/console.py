"""What a person sees while a run goes on."""

import logging
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from nvfp4_train.train.sinks import Row

output = Console(highlight=False, markup=False, soft_wrap=True)


class _ConsoleHandler(logging.Handler):
    """Prints above a progress bar, not through it."""

    def emit(self, record: logging.LogRecord) -> None:
        output.print(self.format(record))


def show_log() -> None:
    """Print what the package logs from now on, such as how GEMMs are multiplied on this machine."""
    logger = logging.getLogger("nvfp4_train")
    logger.setLevel(logging.INFO)
    if not any(isinstance(handler, _ConsoleHandler) for handler in logger.handlers):
        logger.addHandler(_ConsoleHandler())


def describe_row(row: Row, *, total_tokens: int) -> str:
    """Put a metric row on one line."""
    parts = [f"step {row['step']:>6}", f"tokens {short_count(row['tokens'])}/{short_count(total_tokens)}"]
    if "train/loss" in row:
        parts += [f"loss {row['train/loss']:.4f}", f"grad norm {row['train/grad_norm']:.3f}", f"lr {row['lr']:.2e}"]
        parts += [f"{row['tokens_per_second']:,.0f} tokens/s", f"ETA {describe_eta(row, total_tokens=total_tokens)}"]
    if "val/loss" in row:
        parts += [f"val loss {row['val/loss']:.4f}", f"in BF16 {row['val/loss_bf16']:.4f}"]
    return " | ".join(parts)


def describe_eta(row: Row, *, total_tokens: int) -> str:
    """Return the time that the remaining tokens take at the present throughput, without evaluations and saving."""
    remaining = max(total_tokens - row["tokens"], 0)
    return str(timedelta(seconds=round(remaining / row["tokens_per_second"])))


def short_count(count: float) -> str:
    """Write a count with three digits and a unit: 1536 is 1.54k."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:g}"


class PlainLines:
    """A line for each row, for log files.

    Args:
        total_tokens: The run's budget.
    """

    def __init__(self, *, total_tokens: int) -> None:
        self._total_tokens = total_tokens

    def write(self, row: Row) -> None:
        """Print a row."""
        output.print(describe_row(row, total_tokens=self._total_tokens))

    def close(self) -> None:
        """Nothing is open."""


class ProgressBar:
    """A progress bar with loss, tokens/s and the time to go; rows with a validation loss stay on the screen.

    Args:
        total_tokens: The run's budget.
    """

    def __init__(self, *, total_tokens: int) -> None:
        self._total_tokens = total_tokens
        columns = (BarColumn(bar_width=20), TextColumn("{task.percentage:>3.0f}%"), TextColumn("{task.description}"))
        self._progress = Progress(*columns, console=output)
        self._task = self._progress.add_task("starting", total=total_tokens)
        self._progress.start()

    def write(self, row: Row) -> None:
        """Move the bar."""
        if "val/loss" in row:
            self._progress.console.print(describe_row(row, total_tokens=self._total_tokens))
        if "train/loss" in row:
            eta = describe_eta(row, total_tokens=self._total_tokens)
            line = f"step {row['step']} loss {row['train/loss']:.4f} {row['tokens_per_second']:,.0f} tokens/s ETA {eta}"
            self._progress.update(self._task, completed=row["tokens"], description=line)

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._progress.stop()


def build_console(*, progress_bar: bool, total_tokens: int) -> PlainLines | ProgressBar:
    """Return a progress bar where one is wanted and the output is a terminal, else plain lines."""
    if progress_bar and output.is_terminal:
        return ProgressBar(total_tokens=total_tokens)
    return PlainLines(total_tokens=total_tokens)
