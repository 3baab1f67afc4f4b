import builtins
import json
import math
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nvfp4_train.config.logging import LoggingConfig, ProfileConfig, WandbMode
from nvfp4_train.train.run_folder import RunFolder
from nvfp4_train.train.sinks import JsonLines, TensorBoard, WeightsAndBiases, build_sinks, rows_until


def row(step: int) -> dict[str, float]:
    return {"step": step, "tokens": 8 * step, "train/loss": 1 / 3 + step}


def lines(*steps: int) -> str:
    return "".join(json.dumps(row(step)) + "\n" for step in steps)


def logging(*, tensorboard: bool = False, wandb: WandbMode = WandbMode.off) -> LoggingConfig:
    return LoggingConfig(
        interval_steps=1,
        progress_bar=False,
        tensorboard=tensorboard,
        wandb=wandb,
        wandb_project="project",
        profile=ProfileConfig(start_step=0, num_steps=0),
    )


def test_a_row_is_on_disk_when_write_returns_and_exact(tmp_path: Path):
    sink = JsonLines(tmp_path / "metrics.jsonl", resume_step=None)
    sink.write(row(1))
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == row(1)
    sink.close()


def test_a_new_run_starts_a_new_file(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(0, 1))
    JsonLines(path, resume_step=None).close()
    assert path.read_text() == ""


def test_rows_past_the_checkpoint_are_dropped_and_the_rest_goes_on(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(0, 1, 2, 3))
    sink = JsonLines(path, resume_step=2)
    sink.write(row(3))
    sink.close()
    assert path.read_text() == lines(0, 1, 2, 3)


def test_a_torn_line_is_dropped(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(0, 1) + lines(2)[:-1])
    assert rows_until(path, step=9) == lines(0, 1)
    path.write_text(lines(0, 1) + lines(2)[:9])
    assert rows_until(path, step=9) == lines(0, 1)


@pytest.mark.parametrize("damage", [b"garbage\n", b"\xff\xfe\n", b"{}\n", b"3\n", b'{"step": null}\n'])
def test_a_line_that_is_no_row_is_named_and_nothing_is_dropped(tmp_path: Path, damage: bytes):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(lines(0).encode() + damage + lines(1).encode())
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"metrics.jsonl:2: this line is no metric row"):
        JsonLines(path, resume_step=1)
    assert path.read_bytes() == before


def test_a_missing_file_has_no_rows(tmp_path: Path):
    assert rows_until(tmp_path / "metrics.jsonl", step=9) == ""


def test_nan_is_no_json(tmp_path: Path):
    sink = JsonLines(tmp_path / "metrics.jsonl", resume_step=None)
    with pytest.raises(ValueError, match="not JSON compliant"):
        sink.write({"step": 1, "tokens": 8, "train/loss": math.nan})
    sink.close()


def test_tensorboard_gets_every_metric_and_hides_what_a_resume_repeats(tmp_path: Path):
    first = TensorBoard(tmp_path, resume_step=None)
    for step in (1, 2, 3):
        first.write(row(step))
    first.close()
    second = TensorBoard(tmp_path, resume_step=1)
    second.write({"step": 2, "tokens": 16, "train/loss": 7.0})
    second.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert sorted(events.Tags()["scalars"]) == ["tokens", "train/loss"]
    found = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert found == [(1, pytest.approx(1 + 1 / 3)), (2, 7.0)]


def test_wandb_runs_offline(tmp_path: Path):
    pytest.importorskip("wandb")
    sink = WeightsAndBiases(tmp_path, name="run", project="project", mode=WandbMode.offline)
    sink.write(row(1))
    sink.close()
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_a_missing_wandb_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"logging.wandb=offline .* pip install 'nvfp4-train\[wandb\]'"):
        WeightsAndBiases(tmp_path, name="run", project="project", mode=WandbMode.offline)


def test_wandb_is_not_imported_unless_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    imported = []
    real_import = builtins.__import__

    def spy(name: str, *args: object, **kwargs: object) -> object:
        imported.append(name)
        return real_import(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", spy)
    [sink] = build_sinks(logging(), folder=RunFolder(tmp_path), resume_step=None)
    sink.close()
    assert "wandb" not in imported


def test_sinks_are_those_that_the_config_names(tmp_path: Path):
    sinks = build_sinks(logging(tensorboard=True), folder=RunFolder(tmp_path), resume_step=None)
    assert [type(sink) for sink in sinks] == [JsonLines, TensorBoard]
    for sink in sinks:
        sink.close()
    assert list(tmp_path.glob("tensorboard/events*"))
