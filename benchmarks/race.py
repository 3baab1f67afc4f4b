"""Timing of functions side by side: every round calls each of them once, so that a slow moment hits all alike."""

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch


@dataclass(frozen=True, kw_only=True)
class Result:
    """Times of one function.

    Args:
        name: What was timed.
        median_ms: Median over the rounds.
        best_ms: Fastest round.
        ratios: For each reference, median over the rounds of its time by the reference's in the same round.
        elements_per_second: Elements by the median, in 1e9; 0 where that says nothing.
    """

    name: str
    median_ms: float
    best_ms: float
    ratios: dict[str, float]
    elements_per_second: float


def race(
    functions: dict[str, Callable[[], object]],
    *,
    references: tuple[str, ...],
    rounds: int,
    elements: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Result]:
    """Time functions in turns, after one untimed round.

    Args:
        functions: By name.
        references: Those that ratios refer to.
        rounds: How often each is timed.
        elements: That each handles.
        clock: Seconds; `time.thread_time` counts what one thread computes, whatever else the machine does.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for timed in [False] + [True] * rounds:
        for name, function in functions.items():
            start = clock()
            function()
            if timed:
                seconds[name].append(clock() - start)
    results = []
    for name, own in seconds.items():
        ratios = {
            reference: median(a / b for a, b in zip(own, seconds[reference], strict=True)) for reference in references
        }
        results.append(
            Result(
                name=name,
                median_ms=1e3 * median(own),
                best_ms=1e3 * min(own),
                ratios=ratios,
                elements_per_second=elements / median(own) / 1e9,
            )
        )
    return results


def print_table(title: str, results: list[Result]) -> None:
    """Print one line a function."""
    width = max(len(result.name) for result in results)
    heads = "".join(f" {'x ' + reference:>16}" for reference in results[0].ratios)
    print(f"\n{title}\n{'':{width}}  {'median ms':>10} {'best ms':>9}{heads} {'1e9 el/s':>9}")
    for result in results:
        ratios = "".join(f" {ratio:16.2f}" for ratio in result.ratios.values())
        speed = f"{result.elements_per_second:9.2f}" if result.elements_per_second else ""
        print(f"{result.name:{width}}  {result.median_ms:10.2f} {result.best_ms:9.2f}{ratios} {speed}")


def choose_clock(threads: int, *, cpu_time: bool) -> Callable[[], float]:
    """Return the wall clock, or the thread's own time for machines that are busy with other things.

    Raises:
        ValueError: for thread time of more than one thread.
    """
    torch.set_num_threads(threads)
    if cpu_time and threads != 1:
        raise ValueError(f"--cpu-time counts one thread, found --threads {threads}")
    return time.thread_time if cpu_time else time.perf_counter


def save(path: Path, tables: dict[str, list[Result]]) -> None:
    """Write tables and the machine as JSON."""
    machine = {
        "cpu": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
    }
    rows = {title: [asdict(result) for result in results] for title, results in tables.items()}
    path.write_text(json.dumps({"machine": machine, "tables": rows}, indent=2) + "\n")
