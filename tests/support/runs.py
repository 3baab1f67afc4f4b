"""Whole runs: in this process, or as the program that a user starts."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nvfp4_train.analysis.report import report_run
from nvfp4_train.config.load import load_config
from nvfp4_train.train.main import main
from tests.support.ranks import call_on_ranks

ROOT = Path(__file__).resolve().parents[2]
TEXT = ROOT / "tests" / "golden" / "text" / "python_topics.jsonl"

Row = dict[str, int | float]


class RunDirs:
    """Where the runs of a test go.

    Args:
        runs: Folder of the run folders.
        cache: Folder of prepared data, shared by the tests of a process.
    """

    def __init__(self, runs: Path, *, cache: Path) -> None:
        self.runs = runs
        self.cache = cache

    def overrides(self, name: str, *overrides: str) -> list[str]:
        """A tiny run of 10 steps on the committed text."""
        return [
            "experiment=tiny",
            "data=text_files",
            f"data.paths=[{TEXT}]",
            f"data.cache_dir={self.cache}",
            f"run.dir={self.runs}",
            f"run.name={name}",
            "run.tokens=5120",
            "checkpoint.interval_steps=4",
            "evaluation.interval_steps=5",
            "evaluation.num_sequences=4",
            "logging.tensorboard=false",
            *overrides,
        ]

    def train(self, name: str, *overrides: str) -> int:
        """Train in this process and return the exit code."""
        return _train(self.overrides(name, *overrides))

    def train_on_ranks(self, name: str, *overrides: str, ranks: int) -> int:
        """Train on several ranks, without the seconds that a launcher and new interpreters take; as `train`."""
        return max(call_on_ranks(_train, ranks, self.overrides(name, *overrides), timeout_seconds=240))

    def command(self, name: str, *overrides: str, ranks: int = 1) -> list[str]:
        """The command that a user would type."""
        launcher = [sys.executable]
        if ranks > 1:
            launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        return [*launcher, str(ROOT / "scripts" / "pretrain.py"), *self.overrides(name, *overrides)]

    def run(self, name: str, *overrides: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
        """Train in a process of its own, or several."""
        command = self.command(name, *overrides, ranks=ranks)
        return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=ROOT)

    @contextmanager
    def started(self, name: str, *overrides: str) -> Iterator[subprocess.Popen[str]]:
        """Start a run and hand out its process; it is killed at the end of the block if it still runs."""
        process = subprocess.Popen(
            self.command(name, *overrides),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env=dict(os.environ),
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            process.stdout.close()  # type: ignore[union-attr]

    def rows(self, name: str) -> list[Row]:
        """The metric rows of a run, without the speed, which is never the same twice."""
        lines = (self.runs / name / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        timed = ("tokens_per_second", "perf/")
        return [{key: value for key, value in row.items() if not key.startswith(timed)} for row in rows]

    def checkpoints(self, name: str) -> list[str]:
        """Names of the folders in a run's checkpoint folder, hidden ones included."""
        folder = self.runs / name / "checkpoints"
        return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def _train(overrides: list[str]) -> int:
    return main(load_config(overrides), report=report_run)
