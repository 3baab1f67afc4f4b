"""Reads what a run left in its folder."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, int | float]
FILES = ("metrics.jsonl", "model.json", "coverage.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One metric over a run.

    Args:
        steps: Steps of the rows that have it.
        tokens: Tokens of the same rows.
        values: The metric.
    """

    steps: list[int]
    tokens: list[int]
    values: list[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run folder's content.

    Args:
        path: The folder.
        rows: Metric rows in order.
        num_parameters: From ``model.json``.
        coverage: What every Linear runs, from ``coverage.json``.
    """

    path: Path
    rows: list[Row]
    num_parameters: int
    coverage: dict[str, Any]

    def series(self, key: str) -> Series:
        """Return the rows that have metric ``key``."""
        rows = [row for row in self.rows if key in row]
        return Series(
            steps=[int(row["step"]) for row in rows],
            tokens=[int(row["tokens"]) for row in rows],
            values=[float(row[key]) for row in rows],
        )

    def sources(self) -> list[str]:
        """Return the names of the sources of the data, in the order in which they first gave something."""
        names = (key.split("/")[1] for row in self.rows for key in row if key.startswith("data/"))
        return list(dict.fromkeys(names))

    @property
    def tokens_per_second(self) -> float | None:
        """Throughput over all rows, evaluation and saving not counted; None if no step was logged."""
        laps = self._laps()
        seconds = sum(seconds for _, seconds in laps)
        return sum(row["tokens_per_second"] * seconds for row, seconds in laps) / seconds if seconds else None

    def mean_over_time(self, key: str) -> float | None:
        """Return the mean of a metric, each row weighted by the training time since the row before it.

        None if no step was logged with it.
        """
        laps = [(row[key], seconds) for row, seconds in self._laps() if key in row]
        seconds = sum(seconds for _, seconds in laps)
        return sum(value * seconds for value, seconds in laps) / seconds if seconds else None

    def _laps(self) -> list[tuple[Row, float]]:
        """Return each row of a step with the seconds of training that it took."""
        laps = []
        before = self.rows[0]["tokens"] if self.rows else 0
        for row in self.rows:
            if "tokens_per_second" in row:
                laps.append((row, (row["tokens"] - before) / row["tokens_per_second"]))
            before = row["tokens"]
        return laps


def load_run(path: Path) -> Run:
    """Read a run folder.

    Raises:
        ValueError: A file is missing.
    """
    missing = [name for name in FILES if not (path / name).is_file()]
    if missing:
        raise ValueError(f"{path} is not the folder of a run: it has no {' and no '.join(missing)}")
    metrics, model, coverage = ((path / name).read_text(encoding="utf-8") for name in FILES)
    return Run(
        path=path,
        rows=[json.loads(line) for line in metrics.splitlines()],
        num_parameters=json.loads(model)["num_parameters"],
        coverage=json.loads(coverage),
    )
