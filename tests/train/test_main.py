import os
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nvfp4_train.config.load import load_config
from nvfp4_train.train import job
from nvfp4_train.train import main as entry
from nvfp4_train.train.failure import FailedElsewhereError
from nvfp4_train.train.run_folder import RunFolder
from tests.support.runs import RunDirs


def fail_with(error: BaseException) -> Any:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    return fail


def test_the_report_is_printed_at_the_end(dirs: RunDirs, capsys: pytest.CaptureFixture[str]):
    seen = []

    def report(path: Path) -> str:
        seen.append(path)
        return "what it came to"

    overrides = dirs.overrides("run", "run.stop_after_steps=1")
    assert entry.main(load_config(overrides), report=report) == 0
    assert seen == [dirs.runs / "run"]
    assert capsys.readouterr().out.endswith("what it came to\n")


def test_a_rule_that_only_the_model_shows_is_a_configuration_error(dirs: RunDirs, capsys: pytest.CaptureFixture[str]):
    assert dirs.train("run", "recipe.keep_bf16.modules=[nothing.like.this]", "parallel.dp_shard_degree=1") == 2
    told = capsys.readouterr().err
    assert "nothing.like.this" in told
    assert "Traceback" not in told
    assert not (dirs.runs / "run").exists()


def test_ranks_that_are_not_there_are_told(dirs: RunDirs, capsys: pytest.CaptureFixture[str]):
    assert dirs.train("run", "parallel.dp_shard_degree=2") == 2
    told = capsys.readouterr().err
    assert "dp_shard_degree 2 = 2" in told
    assert "there are 1" in told
    assert "start 2 ranks" in told


def test_missing_text_is_told(dirs: RunDirs, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert dirs.train("run", f"data.paths=[{tmp_path / 'nothing.txt'}]") == 1
    told = capsys.readouterr().err
    assert "nothing.txt" in told
    assert "Traceback" not in told
    assert not (dirs.runs / "run").exists()


def test_a_full_disk_is_told(dirs: RunDirs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(os, "fsync", fail_with(OSError(28, "No space left on device")))
    assert dirs.train("run") == 1
    assert "error: [Errno 28] No space left on device" in capsys.readouterr().err


def test_a_bug_keeps_its_stack_trace_and_the_next_run_can_start(dirs: RunDirs, monkeypatch: pytest.MonkeyPatch):
    for _ in range(2):
        monkeypatch.setattr(job, "build_engine", fail_with(KeyError("bug")))
        with pytest.raises(KeyError, match="bug"):
            dirs.train("run")


def test_an_interrupt_before_the_first_step_needs_no_stack_trace(
    dirs: RunDirs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(job, "build_engine", fail_with(KeyboardInterrupt()))
    assert dirs.train("run") == 130
    assert capsys.readouterr().err.startswith("interrupted")


def test_the_other_ranks_leave_quietly_when_rank_0_refuses(
    dirs: RunDirs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    runtime = SimpleNamespace(is_main=False, share=lambda value: None)
    loaded = load_config(dirs.overrides("run"))
    with pytest.raises(FailedElsewhereError):
        entry._agree_on_start(
            loaded,
            folder=RunFolder(dirs.runs / "run"),
            runtime=runtime,  # type: ignore[arg-type]
            stack=ExitStack(),
        )
    monkeypatch.setattr(entry, "_run", fail_with(FailedElsewhereError()))
    assert dirs.train("run") == 1
    assert capsys.readouterr().err == ""


def test_a_run_folder_in_use_is_refused_and_left_alone(dirs: RunDirs, capsys: pytest.CaptureFixture[str]):
    with RunFolder(dirs.runs / "run").lock():
        assert dirs.train("run") == 1
    assert f"is in use by process {os.getpid()}" in capsys.readouterr().err
    assert not (dirs.runs / "run").exists()
    assert dirs.train("run", "run.stop_after_steps=1") == 0


def test_a_folder_of_runs_that_is_a_file_is_told_before_the_data_are_prepared(
    dirs: RunDirs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "file").write_text("")
    assert dirs.train("run", f"run.dir={tmp_path / 'file'}", f"data.cache_dir={tmp_path / 'cache'}") == 1
    assert "set run.dir to a folder that can be written" in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()
