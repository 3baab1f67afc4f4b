"""Say on the console what a long preparation is doing: a bar on a terminal, a line now and then elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

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


class TokenMeter:
    """Shows how many tokens are made, how fast, and how long the rest takes.

    Args:
        description: What is being done.
        done: Tokens that were made before.
    """

    def __init__(self, description: str, *, done: int) -> None:
        self._description = description
        self._first = self._tokens = done
        self._started = self._last = time.monotonic()
        self._first_share: float | None = None  # of the source, when we began
        self._share: float | None = None
        self._bar: Progress | None = None

    def advance(self, share: float | None, tokens: int) -> None:
        """Say what is done.

        Args:
            share: Share of the whole source that is read; None where that is not known.
            tokens: How many more tokens there are.
        """
        self._tokens += tokens
        self._share = share
        if self._first_share is None:
            self._first_share = share if self._first else 0.0
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=100 * (share or 0.0), line=self.line(now))
        elif now - self._last > _SECONDS_BETWEEN_LINES:
            self._last = now
            announce(f"{self._description}: {self.line(now)}")

    def line(self, now: float) -> str:
        """Return tokens, tokens a second and the time that is left, as one line."""
        seconds = max(now - self._started, 1e-9)
        parts = [
            f"{self._tokens / 1e6:,.1f} M tokens",
            f"{(self._tokens - self._first) / seconds / 1e6:.2f} M tokens/s",
        ]
        begun = self._first_share or 0.0
        if self._share is not None and self._share > begun:
            left = seconds * (1 - self._share) / (self._share - begun)
            parts = [f"{100 * self._share:.0f} %", *parts, f"{timedelta(seconds=round(left))} left"]
        return ", ".join(parts)

    @contextmanager
    def shown(self) -> Iterator["TokenMeter"]:
        """Show it while the block runs: a bar on a terminal, a line now and then elsewhere."""
        console = Console()
        announce(self._description)
        if console.is_terminal:
            columns = (TextColumn("data: {task.description}"), BarColumn(), TextColumn("{task.fields[line]}"))
            with Progress(*columns, console=console) as self._bar:
                self._bar.add_task(self._description, total=100, line="")
                yield self
        else:
            yield self
        seconds = time.monotonic() - self._started
        rate = (self._tokens - self._first) / max(seconds, 1e-9) / 1e6
        announce(f"{self._description}: {self._tokens:,} tokens in {seconds:.1f} s, {rate:.2f} M tokens/s")
