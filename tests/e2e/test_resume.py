"""A run that was killed, stopped, changed or finished, and is started again."""

import json
import signal
import time
from pathlib import Path
from subprocess import Popen

import pytest

from tests.support.runs import RunDirs


@pytest.fixture(scope="module")
def trunk(module_dirs: RunDirs) -> RunDirs:
    """An unbroken run, in the NVFP4 recipe with stochastic rounding."""
    assert module_dirs.train("trunk") == 0
    return module_dirs


def wait_for_step(dirs: RunDirs, name: str, step: int, process: "Popen[str]") -> None:
    """Wait until the row of ``step`` is on disk; the next step has begun or is about to."""
    metrics = dirs.runs / name / "metrics.jsonl"
    while not (metrics.exists() and f'"step": {step},' in metrics.read_text()):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)


def test_a_killed_run_goes_on_bitwise(trunk: RunDirs, dirs: RunDirs):
    with dirs.started("killed") as process:
        wait_for_step(dirs, "killed", 5, process)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert "step_00000004" in dirs.checkpoints("killed")
    assert "step_00000010" not in dirs.checkpoints("killed")
    assert dirs.train("killed") == 0
    assert dirs.rows("killed") == trunk.rows("trunk")


def test_a_stopped_run_is_saved_and_goes_on_bitwise(trunk: RunDirs, dirs: RunDirs):
    with dirs.started("stopped") as process:
        wait_for_step(dirs, "stopped", 1, process)
        process.send_signal(signal.SIGTERM)
        output = process.communicate()[0]
    assert process.returncode == 128 + signal.SIGTERM
    assert "asked to stop by SIGTERM; saved at step" in output
    assert dirs.checkpoints("stopped")
    assert dirs.train("stopped") == 0
    assert dirs.rows("stopped") == trunk.rows("trunk")


def test_a_run_in_two_parts_is_the_run_in_one(trunk: RunDirs, dirs: RunDirs):
    assert dirs.train("parts", "run.stop_after_steps=5") == 0
    assert dirs.checkpoints("parts")[-1] == "step_00000005"
    assert dirs.train("parts") == 0
    assert dirs.rows("parts") == trunk.rows("trunk")


def test_a_finished_run_says_so_and_trains_nothing(trunk: RunDirs, capsys: pytest.CaptureFixture[str]):
    metrics = trunk.runs / "trunk" / "metrics.jsonl"
    before = metrics.read_bytes()
    assert trunk.train("trunk") == 0
    shown = capsys.readouterr().out
    assert "nothing to train: the run is finished, it has all 5,120 tokens" in shown
    assert "validation loss" in shown
    assert metrics.read_bytes() == before


def test_a_stop_that_is_reached_is_told(dirs: RunDirs, capsys: pytest.CaptureFixture[str]):
    for _ in range(2):
        assert dirs.train("short", "run.stop_after_steps=1") == 0
    assert "it has run.stop_after_steps=1; run.stop_after_steps=null continues it" in capsys.readouterr().out


def test_never_refuses_to_overwrite(trunk: RunDirs, capsys: pytest.CaptureFixture[str]):
    assert trunk.train("trunk", "resume=never") == 1
    told = capsys.readouterr()
    assert "error: the run folder" in told.err
    assert "run.name=NEW_NAME" in told.err
    assert "Traceback" not in told.err + told.out


def test_a_changed_config_is_refused_as_a_difference(trunk: RunDirs, capsys: pytest.CaptureFixture[str]):
    assert trunk.train("trunk", "scheduler.max_lr=1e-4", "batch.global_batch_size=4") == 1
    told = capsys.readouterr().err
    assert "    batch.global_batch_size: 8 -> 4\n    scheduler.max_lr: 0.003 -> 0.0001\n" in told


def test_changed_text_is_refused_with_both_fingerprints(
    trunk: RunDirs, dirs: RunDirs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    text = tmp_path / "text.jsonl"
    lines = [json.dumps({"text": f"document {index} " * 200}) for index in range(40)]
    overrides = [f"data.paths=[{text}]", "data.validation_fraction=0.3", "run.stop_after_steps=1"]
    text.write_text("\n".join(lines))
    assert dirs.train("changed", *overrides) == 0
    text.write_text("\n".join(lines[:-1]))
    assert dirs.train("changed", *overrides, "run.stop_after_steps=2") == 1
    told = capsys.readouterr().err
    assert "found:    fingerprint" in told
    assert "expected: fingerprint" in told


def test_an_incomplete_checkpoint_is_passed_over(dirs: RunDirs, capsys: pytest.CaptureFixture[str]):
    assert dirs.train("torn", "run.stop_after_steps=5") == 0
    (dirs.runs / "torn" / "checkpoints" / "step_00000005" / "COMPLETE").unlink()
    assert dirs.train("torn", "run.stop_after_steps=6") == 0
    told = capsys.readouterr()
    assert "step_00000005 is ignored" in told.err
    assert "step_00000004: step 4" in told.out
    assert [row["step"] for row in dirs.rows("torn")] == list(range(7))


def test_a_fork_changes_recipe_and_schedule_and_knows_its_trunk(trunk: RunDirs, dirs: RunDirs):
    checkpoint = trunk.runs / "trunk" / "checkpoints" / "step_00000008"
    overrides = [f"resume={checkpoint}", "resume_mode=fork", "recipe=bf16", "scheduler.decay_fraction=0.5"]
    assert dirs.train("fork", *overrides) == 0
    rows = dirs.rows("fork")
    assert [row["step"] for row in rows] == [8, 9, 10]
    assert rows[0]["val/loss"] == rows[0]["val/loss_bf16"]
    lineage = json.loads((dirs.runs / "fork" / "lineage.json").read_text())
    assert (lineage["checkpoint"], lineage["step"], lineage["tokens"]) == (str(checkpoint.resolve()), 8, 4096)
    assert lineage["differences"]["recipe.name"] == {"old": "nvfp4", "new": "bf16"}
    # the same text goes on where the trunk stopped reading: the losses are close, and not those of other rows
    assert abs(rows[1]["train/loss"] - trunk.rows("trunk")[9]["train/loss"]) < 0.05


def test_continue_from_a_path_is_the_same_run_elsewhere(trunk: RunDirs, dirs: RunDirs):
    checkpoint = trunk.runs / "trunk" / "checkpoints" / "step_00000008"
    assert dirs.train("copy", f"resume={checkpoint}") == 0
    assert dirs.rows("copy")[1:] == trunk.rows("trunk")[9:]


def test_a_fork_onto_other_text_begins_at_its_start(trunk: RunDirs, dirs: RunDirs):
    checkpoint = trunk.runs / "trunk" / "checkpoints" / "step_00000008"
    overrides = ["data.validation_fraction=0.2", "run.stop_after_steps=9"]
    assert dirs.train("other", f"resume={checkpoint}", "resume_mode=fork", *overrides) == 0
    metadata = json.loads((dirs.runs / "other" / "checkpoints" / "step_00000009" / "metadata.json").read_text())
    assert metadata["metadata"]["train_state"] == {"step": 9, "tokens": 4608, "sequences": 8}


def test_a_fork_without_budget_is_refused(trunk: RunDirs, dirs: RunDirs, capsys: pytest.CaptureFixture[str]):
    run = trunk.runs / "trunk"
    assert dirs.train("late", f"resume={run}", "resume_mode=fork") == 1
    assert "has seen 5120 tokens in 10 steps" in capsys.readouterr().err
    assert not (dirs.runs / "late").exists()
