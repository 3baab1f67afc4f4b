import shutil
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nvfp4_train.checkpoint.error import CheckpointError
from nvfp4_train.checkpoint.folder import CheckpointInfo, mark_complete, read_info, write_info
from nvfp4_train.config.load import load_config, load_yaml
from nvfp4_train.config.train import ResumeMode
from nvfp4_train.train.resume import Request, Start, decide_start, resume_data
from nvfp4_train.train.run_folder import RunFolder
from nvfp4_train.train.state import TrainState

DATA = {"fingerprint": "abc", "sequence_length": 64, "sources": {}}
CONFIG = load_yaml(load_config(["experiment=tiny"]).yaml)


def changed(**values: object) -> dict[str, Any]:
    """The configuration with other values, keys written ``group__key``."""
    config = deepcopy(CONFIG)
    for name, value in values.items():
        group, key = name.split("__")
        config[group][key] = value  # type: ignore[index]
    return config


def request(resume: str | Path = "auto", *, mode: str = "continue", config: dict[str, Any] | None = None) -> Request:
    return Request(resume=str(resume), mode=ResumeMode[mode], config=config or CONFIG)


def save(run: RunFolder, step: int, *, complete: bool = True) -> Path:
    path = run.checkpoints / f"step_{step:08d}"
    path.mkdir(parents=True)
    state = TrainState(step=step, tokens=512 * step, sequences=8 * step)
    info = CheckpointInfo(
        format_version=1,
        engine="torch",
        step=step,
        num_ranks=1,
        torch_version="2",
        metadata={"train_state": state.to_dict(), "data": DATA, "config": CONFIG},
    )
    write_info(path, info)
    if complete:
        mark_complete(path)
    return path


@pytest.fixture
def trunk(tmp_path: Path) -> RunFolder:
    """A run with checkpoints of steps 10 and 20."""
    folder = RunFolder(tmp_path / "trunk")
    folder.write_text("metrics.jsonl", "")
    save(folder, 10)
    save(folder, 20)
    return folder


@pytest.fixture
def branch(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "branch")


def test_a_new_run_starts_from_nothing(branch: RunFolder):
    start = decide_start(request(), folder=branch)
    assert start == Start()
    assert start.state() == TrainState()


def test_the_same_command_continues_from_the_newest_checkpoint(trunk: RunFolder):
    start = decide_start(request(), folder=trunk)
    assert start.checkpoint == trunk.checkpoints / "step_00000020"
    assert start.state() == TrainState(step=20, tokens=10_240, sequences=160)
    assert start.is_own
    assert start.differences == ()


def test_a_checkpoint_without_its_marker_is_ignored_with_a_warning(trunk: RunFolder):
    save(trunk, 30, complete=False)
    with pytest.warns(UserWarning, match="step_00000030 is ignored"):
        start = decide_start(request(), folder=trunk)
    assert start.state().step == 20


@pytest.mark.parametrize("key", ["train_state", "data", "config"])
@pytest.mark.parametrize("value", [None, {}, 3])
def test_a_checkpoint_that_does_not_say_where_it_stands_is_refused(trunk: RunFolder, key: str, value: object):
    info = read_info(trunk.checkpoints / "step_00000020")
    info.metadata[key] = value
    if (key, value) == ("config", {}):
        del info.metadata[key]
    write_info(trunk.checkpoints / "step_00000020", info)
    with pytest.raises(CheckpointError, match=rf"metadata.json could not be read: KeyError: '{key}'"):
        decide_start(request(), folder=trunk)


def test_never_starts_afresh_in_an_empty_folder(branch: RunFolder):
    assert decide_start(request("never"), folder=branch) == Start()
    branch.path.mkdir()
    assert decide_start(request("never"), folder=branch) == Start()


def test_never_does_not_overwrite(trunk: RunFolder):
    shutil.rmtree(trunk.checkpoints)
    with pytest.raises(ValueError, match=r"trunk exists.*\n.*run.name=NEW_NAME"):
        decide_start(request("never"), folder=trunk)


def test_a_change_of_state_or_data_order_is_refused_and_shown(trunk: RunFolder):
    config = changed(model__d_model=128, batch__global_batch_size=16, logging__interval_steps=5)
    with pytest.raises(ValueError, match="change its state or data order") as error:
        decide_start(request(config=config), folder=trunk)
    assert "batch.global_batch_size: 8 -> 16\n    model.d_model: 64 -> 128\n" in str(error.value)
    assert "interval_steps" not in str(error.value)


def test_a_harmless_change_is_told(trunk: RunFolder):
    config = changed(logging__interval_steps=5, run__name="other", run__tokens=40_960)
    start = decide_start(request(config=config), folder=trunk)
    assert [str(difference) for difference in start.differences] == [
        "run.tokens: 20480 -> 40960",
        "logging.interval_steps: 1 -> 5",
    ]


def test_a_fork_starts_from_any_checkpoint_with_another_schedule(trunk: RunFolder, branch: RunFolder):
    checkpoint = trunk.checkpoints / "step_00000010"
    config = changed(scheduler__max_lr=1e-4, run__name="branch")
    start = decide_start(request(checkpoint, mode="fork", config=config), folder=branch)
    assert start.checkpoint == checkpoint
    assert start.state().step == 10
    assert not start.is_own
    assert start.lineage == {
        "resume": str(checkpoint),
        "resume_mode": "fork",
        "checkpoint": str(checkpoint.resolve()),
        "step": 10,
        "tokens": 5120,
        "differences": {"scheduler.max_lr": {"old": 0.003, "new": 0.0001}},
    }


def test_a_run_folder_stands_for_its_newest_checkpoint(trunk: RunFolder, branch: RunFolder):
    start = decide_start(request(trunk.path), folder=branch)
    assert start.checkpoint == trunk.checkpoints / "step_00000020"


def test_continue_from_a_path_needs_the_same_configuration(trunk: RunFolder, branch: RunFolder):
    with pytest.raises(ValueError, match=r"scheduler.max_lr: 0.003 -> 0.0001\n.*resume_mode=fork"):
        decide_start(request(trunk.path, config=changed(scheduler__max_lr=1e-4)), folder=branch)


def test_a_fork_keeps_the_shape_of_the_model(trunk: RunFolder, branch: RunFolder):
    with pytest.raises(ValueError, match=r"cannot change .* shape.*\n    model.d_model: 64 -> 128"):
        decide_start(request(trunk.path, mode="fork", config=changed(model__d_model=128)), folder=branch)


def test_the_command_of_a_fork_continues_the_fork(trunk: RunFolder, branch: RunFolder):
    config = changed(scheduler__max_lr=1e-4)
    first = decide_start(request(trunk.path, mode="fork", config=config), folder=branch)
    branch.write_lineage(first.lineage)
    save(branch, 25)
    with pytest.raises(ValueError, match=r"scheduler\.max_lr"):  # its own checkpoint was saved with the old rate
        decide_start(request(trunk.path, mode="fork", config=config), folder=branch)
    start = decide_start(request(trunk.path, mode="fork"), folder=branch)
    assert start.state().step == 25
    assert start.is_own
    assert start.lineage == first.lineage


def test_the_command_of_a_fork_works_after_its_trunk_is_gone(trunk: RunFolder, branch: RunFolder):
    branch.write_lineage(decide_start(request(trunk.path), folder=branch).lineage)
    save(branch, 25)
    shutil.rmtree(trunk.path)
    assert decide_start(request(trunk.path), folder=branch).state().step == 25


def test_a_run_with_checkpoints_does_not_start_from_others(trunk: RunFolder, branch: RunFolder):
    save(branch, 25)
    with pytest.raises(ValueError, match="has checkpoints of its own, the newest is step_00000025"):
        decide_start(request(trunk.path), folder=branch)


def test_a_run_does_not_go_back_to_its_own_past(trunk: RunFolder):
    with pytest.raises(ValueError, match="the newest is step_00000020"):
        decide_start(request(trunk.checkpoints / "step_00000010"), folder=trunk)
    assert decide_start(request(trunk.checkpoints / "step_00000020"), folder=trunk).is_own


def test_a_path_without_a_checkpoint_is_refused(trunk: RunFolder, branch: RunFolder, tmp_path: Path):
    with pytest.raises(CheckpointError, match="does not exist"):
        decide_start(request(tmp_path / "nothing"), folder=branch)
    incomplete = save(trunk, 30, complete=False)
    with pytest.raises(CheckpointError, match="has no COMPLETE marker"):
        decide_start(request(incomplete), folder=branch)


class FakeData:
    """Data whose state is DATA, or not."""

    def __init__(self, *changes: str, starts_new_phase: bool = False) -> None:
        self.fingerprint = "xyz" if changes else "abc"
        self.starts_new_phase = starts_new_phase
        self.asked: list[tuple[object, ...]] = []
        self._changes = list(changes)

    def changes(self, saved: dict[str, Any], *, sequences: int) -> list[str]:
        self.asked.append((saved, sequences))
        return self._changes

    def begin_phase(self, saved: dict[str, Any], *, tokens: int) -> dict[str, int]:
        self.asked.append((saved, tokens))
        return {"web": 100, "new": 0}


def test_other_data_are_refused_with_both_fingerprints(trunk: RunFolder):
    start = decide_start(request(), folder=trunk)
    expected = r"found:    fingerprint xyz\n    expected: fingerprint abc\n +source web: it changed\n    fix: "
    with pytest.raises(ValueError, match=expected):
        resume_data(start, FakeData("source web: it changed"))  # type: ignore[arg-type]


def test_the_same_data_go_on(trunk: RunFolder):
    start, data = decide_start(request(), folder=trunk), FakeData()
    state = start.state()
    assert resume_data(start, data) == (state.sequences, [])  # type: ignore[arg-type]
    assert data.asked == [(DATA, state.sequences)]


def test_a_checkpoint_without_cursors_is_refused(trunk: RunFolder):
    start = decide_start(request(), folder=trunk)
    old = {"fingerprint": "abc", "sequence_length": 64, "seed": 1}
    start = replace(start, metadata={**start.metadata, "data": old})
    with pytest.raises(ValueError, match="does not say what was read from each source"):
        resume_data(start, FakeData())  # type: ignore[arg-type]


def test_a_run_from_the_beginning_compares_nothing():
    data = FakeData("changed")
    assert resume_data(Start(), data) == (0, [])  # type: ignore[arg-type]
    assert data.asked == []


def test_a_fork_onto_other_data_begins_at_their_start(trunk: RunFolder, branch: RunFolder):
    start = decide_start(request(trunk.path, mode="fork"), folder=branch)
    assert resume_data(start, FakeData()) == (start.state().sequences, [])  # type: ignore[arg-type]
    data = FakeData("source web: it changed")
    position, changes = resume_data(start, data)  # type: ignore[arg-type]
    assert position == 0
    assert changes == [
        "source web: it changed", "source web: goes on at token 100", "source new: goes on at token 0"
    ]  # fmt: skip
    assert data.asked[-1] == (DATA, start.state().tokens)


def test_a_new_phase_goes_on_with_other_data(trunk: RunFolder):
    start = decide_start(request(), folder=trunk)
    position, changes = resume_data(start, FakeData("source web: it changed", starts_new_phase=True))  # type: ignore[arg-type]
    assert position == 0
    assert changes[0] == "source web: it changed"
