"""Say on the console what a long preparation is doing: a bar on a terminal, a line now and then elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_SECONDS_BETWEEN_LINES = 10.0


def announce(message: str) -> None:
    """Print one line about the data."""
    Console(soft_wrap=True).print(f"data: {message}", highlight=False, markup=False)


@contextmanager
def show_progress(description: str, *, total: int) -> Iterator[Callable[[int], None]]:
    """Show progress while the block runs.

    Args:
        description: What is being done.
        total: Units of work in all.

    Yields:
        A function that is told how many more units are done.
    """
    console = Console()
    if not console.is_terminal:
        with _plain_progress(description, total) as advance:
            yield advance
        return
    columns = (
        TextColumn("data: {task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(description, total=total)
        yield lambda amount: bar.update(task, advance=amount)


@contextmanager
def _plain_progress(description: str, total: int) -> Iterator[Callable[[int], None]]:
    started = last = time.monotonic()
    done = 0

    def advance(amount: int) -> None:
        nonlocal done, last
        done += amount
        if done < total and time.monotonic() - last > _SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            announce(f"{description}: {100 * done / total:.0f} %")

    announce(description)
    yield advance
    announce(f"{description}: done in {time.monotonic() - started:.1f} s")
