"""Runs on a pipeline, as a user starts them."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.runs import RunDirs

# Experts on both stages and in a depth of multi-token prediction.
EXPERTS = ("recipe=fp32", "model.pattern='ME|*E/*E'", "model.moe.auxiliary_loss_weight=0.01")
PIPELINE = ("parallel.pp_degree=2", *EXPERTS)
LOSSES = ("train/loss", "train/mtp_1_loss", "train/router_loss", "train/grad_norm", "val/loss", "val/loss_bf16")


@pytest.fixture(scope="module")
def runs(module_dirs: RunDirs) -> RunDirs:
    done = module_dirs.run("pipeline", *PIPELINE, "run.stop_after_steps=6", ranks=2)
    assert done.returncode == 0, done.stderr
    assert module_dirs.train("alone", *EXPERTS, "run.stop_after_steps=6") == 0
    return module_dirs


@pytest.mark.distributed
def test_a_run_writes_what_one_process_writes(runs: RunDirs):
    """One row per step, whoever has the loss; evaluations, and files that describe the whole model."""
    pairs = list(zip(runs.rows("pipeline"), runs.rows("alone"), strict=True))
    assert {key for row, _ in pairs for key in row} >= {*LOSSES, "moe/blocks.1/max_violation"}
    for found, expected in pairs:
        assert list(found) == list(expected)
        for key in (key for key in LOSSES if key in expected):
            assert found[key] == pytest.approx(expected[key], rel=1e-5)
    first, alone = pairs[1]  # after the evaluation before the first step
    # of the rank that keeps most
    assert 0 < first.pop("precision/memory") < alone.pop("precision/memory")
    assert first == pytest.approx(alone, rel=1e-5)
    assert sum("val/loss" in row for row, _ in pairs) == 3
    files = {path.name for path in (runs.runs / "pipeline").iterdir()}
    assert files == {path.name for path in (runs.runs / "alone").iterdir()}
    for name in ("model.json", "coverage.json"):
        texts = [(runs.runs / run / name).read_text() for run in ("pipeline", "alone")]
        assert texts[0] == texts[1]


@pytest.mark.distributed
def test_the_work_of_a_token_is_that_of_one_process(runs: RunDirs):
    """In FLOPs, of which each of two devices does half."""
    work = []
    for name, num_devices in (("pipeline", 2), ("alone", 1)):
        row = json.loads((runs.runs / name / "metrics.jsonl").read_text().splitlines()[-1])
        work.append(row["perf/model_tflops_per_device"] * num_devices / row["tokens_per_second"])
    assert work[0] == pytest.approx(work[1], rel=1e-9)


@pytest.mark.distributed
def test_one_process_goes_on_with_it(runs: RunDirs):
    for name in ("pipeline", "alone"):
        assert runs.train(name, *EXPERTS, "run.stop_after_steps=8") == 0
    found, expected = (runs.rows(name)[-1] for name in ("pipeline", "alone"))
    assert found["step"] == expected["step"] == 8
    assert found["train/loss"] == pytest.approx(expected["train/loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_layout_that_cannot_be_is_explained(module_dirs: RunDirs):
    done = module_dirs.run("wrong", "parallel.pp_degree=2", "batch.global_batch_size=4", ranks=2)
    assert done.returncode != 0
    assert "batch.global_batch_size" in done.stderr
    assert "needs at least 2" in done.stderr
    assert not (module_dirs.runs / "wrong" / "checkpoints").exists()


@pytest.mark.slow
@pytest.mark.distributed
def test_a_signal_to_one_rank_stops_all_with_a_checkpoint(module_dirs: RunDirs):
    """The other rank of a pipeline waits for activations: it has to hear of it."""
    overrides = ("parallel.pp_degree=2", "recipe=bf16", "run.tokens=5_000_000", "checkpoint.interval_steps=0")
    command = module_dirs.command("stopped", *overrides, "evaluation.interval_steps=0", ranks=2)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        _wait_for(module_dirs.runs / "stopped" / "metrics.jsonl", process)
        os.kill(_pid_of_rank(1, launcher=process.pid), signal.SIGTERM)
        assert process.wait(timeout=120) != 0
    finally:
        process.kill()
        process.wait()
        process.stderr.close()  # type: ignore[union-attr]
    assert len(module_dirs.checkpoints("stopped")) == 1


def _pid_of_rank(rank: int, *, launcher: int) -> int:
    """Find a rank among the children of the launcher, by its environment."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            environment = (path / "environ").read_bytes().split(b"\0")
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if parent == launcher and f"RANK={rank}".encode() in environment:
            return int(path.name)
    raise AssertionError(f"no process of rank {rank} below {launcher}")


def _wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(process.stderr.read() if process.stderr else "")
        if path.exists() and len(path.read_text().splitlines()) > 3:
            return
        time.sleep(0.2)
    raise AssertionError(f"{path} has no rows")
