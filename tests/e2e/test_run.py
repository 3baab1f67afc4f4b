"""A run from start to end: what it leaves behind."""

import json
from pathlib import Path

import pytest

from nvfp4_train.config.load import load_config
from tests.support.runs import RunDirs

TRAINED = {
    "step",
    "tokens",
    "train/loss",
    "train/grad_norm",
    "lr",
    "data/text/tokens",
    "data/text/epochs",
    "precision/memory",
}
EVALUATED = {"val/loss", "val/loss_bf16"}


@pytest.fixture(scope="module")
def run(module_dirs: RunDirs) -> RunDirs:
    overrides = ["logging.tensorboard=true", "logging.profile.start_step=3", "logging.profile.num_steps=1"]
    assert module_dirs.train("whole", *overrides) == 0
    return module_dirs


@pytest.fixture(scope="module")
def folder(run: RunDirs) -> Path:
    return run.runs / "whole"


def test_every_file_is_there(folder: Path):
    expected = (
        "checkpoints config.yaml coverage.json loss.png metrics.jsonl model.json overrides.yaml profile summary.json"
    )
    assert sorted(path.name for path in folder.iterdir()) == [*expected.split(), "tensorboard", "versions.json"]
    assert sorted(path.name for path in (folder / "profile").iterdir()) == ["rank_0.trace.json.gz", "rank_0.txt"]


def test_the_saved_overrides_compose_to_the_saved_config(folder: Path):
    lines = (folder / "overrides.yaml").read_text().splitlines()
    overrides = [json.loads(line.removeprefix("- ")) for line in lines]
    assert load_config(overrides).yaml == (folder / "config.yaml").read_text()


def test_every_step_has_a_row_and_evaluations_have_both_losses(run: RunDirs):
    rows = run.rows("whole")
    assert [row["step"] for row in rows] == list(range(11))
    assert [row["tokens"] for row in rows] == list(range(0, 5121, 512))
    evaluated = [0, 5, 10]
    for row in rows:
        expected = TRAINED if row["step"] else {"step", "tokens"}
        assert set(row) == expected | (EVALUATED if row["step"] in evaluated else set())


def test_it_learns(run: RunDirs):
    rows = run.rows("whole")
    assert rows[-1]["val/loss"] < rows[0]["val/loss"] - 0.3
    # the recipe rounds, and little is lost by it
    assert 0 < abs(rows[-1]["val/loss"] - rows[-1]["val/loss_bf16"]) < 0.02 * rows[-1]["val/loss"]


def test_checkpoints_are_kept_as_configured(run: RunDirs):
    assert run.checkpoints("whole") == ["step_00000008", "step_00000010"]


def test_the_summary_agrees_with_the_rows(run: RunDirs, folder: Path):
    summary, rows = json.loads((folder / "summary.json").read_text()), run.rows("whole")
    assert summary["val_loss"] == {"start": rows[0]["val/loss"], "end": rows[-1]["val/loss"]}
    assert summary["train_loss"] == {"start": rows[1]["train/loss"], "end": rows[-1]["train/loss"]}
    assert (summary["step"], summary["tokens"]) == (10, 5120)
    coverage = json.loads((folder / "coverage.json").read_text())
    assert 0 < summary["fp4_share_of_linear_flops"] == coverage["flops_share_low_precision"] < 1
    assert summary["tokens_per_second"] > 0


def test_the_bf16_recipe_has_two_equal_validation_losses(dirs: RunDirs):
    assert dirs.train("bf16", "recipe=bf16", "run.stop_after_steps=1") == 0
    last = dirs.rows("bf16")[-1]
    assert last["val/loss"] == last["val/loss_bf16"]
