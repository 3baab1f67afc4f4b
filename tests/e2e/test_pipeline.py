"""Runs on a pipeline, as a user starts them, and checkpoints that move between layouts."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_train.checkpoint.state import collect_state
from nvfp4_train.config.recipe import ComputeDtype
from nvfp4_train.config.run import Device
from nvfp4_train.engine.base import Engine
from nvfp4_train.parallel.runtime import Runtime, start_runtime, stop_runtime
from tests.support.engines import build_tiny_engine, train
from tests.support.ranks import run_on_ranks
from tests.support.recipes import cast_recipe
from tests.support.runs import RunDirs
from tests.support.tiny import parallel_layout, tiny_model

FP32 = cast_recipe(ComputeDtype.fp32)
MODEL = tiny_model("M*-E/*E")  # with an embedding at both ends
LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {},
    "fsdp2": {"shard": 2},
    "pp2": {"pp": 2},
    "pp2 interleaved": {"pp": 2, "schedule": "interleaved", "stages_per_rank": 2},
}
PAIRS = [
    ("single", "pp2"),
    ("pp2", "single"),
    ("pp2", "pp2 interleaved"),
    ("pp2 interleaved", "fsdp2"),
    ("fsdp2", "pp2"),
]
# Experts on both stages and in a depth of multi-token prediction.
EXPERTS = ("recipe=fp32", "model.pattern='ME|*E/*E'", "model.moe.auxiliary_loss_weight=0.01")
PIPELINE = ("parallel.pp_degree=2", *EXPERTS)
LOSSES = ("train/loss", "train/mtp_1_loss", "train/router_loss", "train/grad_norm", "val/loss", "val/loss_bf16")


def engine_of(runtime: Runtime, layout: str, *, seed: int = 0) -> Engine:
    return build_tiny_engine(runtime, FP32, model=MODEL, parallel=parallel_layout(**LAYOUTS[layout]), seed=seed)


def full(value: Tensor) -> Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()


def state_of(engine: Engine) -> dict[str, Tensor]:
    """Masters, buffers and optimizer state that this rank has a part of."""
    state = collect_state(engine.model, engine._optimizer)
    found = {name: full(value) for name, value in state["model"].items()}
    return found | {
        f"{name}:{key}": full(value) for name, values in state["optimizer"].items() for key, value in values.items()
    }


def save(runtime: Runtime, folder: Path, layouts: list[str]) -> dict[str, Any]:
    found = {}
    for layout in layouts:
        engine = engine_of(runtime, layout)
        train(engine, range(2))
        engine.save(folder / layout.replace(" ", "_") / "step_00000002", {"tokens": 256})
        found[layout] = {"state": state_of(engine), "next": train(engine, range(2, 3))}
    return found


def load(runtime: Runtime, folder: Path, pairs: list[tuple[str, str]]) -> dict[str, Any]:
    found = {}
    for source, target in pairs:
        engine = engine_of(runtime, target, seed=9)
        engine.load(folder / source.replace(" ", "_") / "step_00000002")
        found[f"{source} -> {target}"] = {"state": state_of(engine), "next": train(engine, range(2, 3))}
    return found


@pytest.fixture(scope="module")
def moved(tmp_path_factory) -> tuple[dict[str, list[dict[str, Any]]], dict[str, list[dict[str, Any]]]]:
    """What each rank saved by layout, and what each rank loaded by pair."""
    folder = tmp_path_factory.mktemp("checkpoints")
    runtime = start_runtime(Device.cpu)
    saved = [save(runtime, folder, ["single"])]
    stop_runtime()
    by_two = [name for name in LAYOUTS if name != "single"]
    saved_by_two = run_on_ranks(save, 2, folder, by_two, timeout_seconds=240)
    loaded_by_two = run_on_ranks(load, 2, folder, [pair for pair in PAIRS if pair[1] != "single"], timeout_seconds=240)
    runtime = start_runtime(Device.cpu)
    loaded = [load(runtime, folder, [pair for pair in PAIRS if pair[1] == "single"])]
    stop_runtime()
    return _by_name(saved, saved_by_two), _by_name(loaded, loaded_by_two)


def _by_name(*groups: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return {name: [rank[name] for rank in group] for group in groups for name in group[0]}


def all_of(ranks: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {name: value for rank in ranks for name, value in rank["state"].items()}


@pytest.mark.distributed
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_a_checkpoint_moves_to_another_layout(moved, source, target):
    saved, loaded = moved
    before, after = all_of(saved[source]), all_of(loaded[f"{source} -> {target}"])
    assert after.keys() == before.keys()
    assert [name for name in after if not torch.equal(after[name], before[name])] == []
    for rank in loaded[f"{source} -> {target}"]:
        for value, expected in zip(rank["next"][0], saved[source][0]["next"][0], strict=True):
            assert value == pytest.approx(expected, rel=1e-6)


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
