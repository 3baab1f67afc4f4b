import json

import pytest

from nvfp4_train.config.load import load_config, load_yaml
from nvfp4_train.model.hybrid import build_model
from tests.support.runs import RunDirs

ONE_STEP = "run.stop_after_steps=1"


def test_the_folder_describes_the_run(dirs: RunDirs):
    quoted = "recipe.keep_bf16.modules=[lm_head,'blocks.0.*']"
    assert dirs.train("run", ONE_STEP, quoted) == 0
    folder = dirs.runs / "run"
    loaded = load_config(dirs.overrides("run", ONE_STEP, quoted))
    assert load_yaml((folder / "config.yaml").read_text()) == load_yaml(loaded.yaml)
    assert f"- {json.dumps(quoted)}\n" in (folder / "overrides.yaml").read_text()
    expected = sum(parameter.numel() for parameter in build_model(loaded.cfg.model).parameters())
    assert json.loads((folder / "model.json").read_text()) == {"num_parameters": expected}
    kept = {row["module"]: row["recipe"] for row in json.loads((folder / "coverage.json").read_text())["linears"]}
    assert kept["blocks.0.mixer.in_proj"] == "bf16"
    assert kept["blocks.1.mixer.qkv_proj"] == "nvfp4"
    assert not (folder / "lineage.json").exists()


def test_a_checkpoint_records_data_config_and_versions(dirs: RunDirs):
    assert dirs.train("run", ONE_STEP) == 0
    info = json.loads((dirs.runs / "run" / "checkpoints" / "step_00000001" / "metadata.json").read_text())
    metadata = info["metadata"]
    assert metadata["train_state"] == {"step": 1, "tokens": 512, "sequences": 8}
    assert metadata["data"]["sources"]["text"]["tokens"] == 512
    assert len(metadata["data"]["fingerprint"]) >= 16
    assert metadata["config"] == load_yaml(load_config(dirs.overrides("run", ONE_STEP)).yaml)
    assert metadata["versions"] == json.loads((dirs.runs / "run" / "versions.json").read_text())


def test_a_start_says_what_it_does(dirs: RunDirs, capsys: pytest.CaptureFixture[str]):
    assert dirs.train("run", ONE_STEP) == 0
    first = capsys.readouterr().out
    assert f"run run in {dirs.runs / 'run'}\n168k parameters\n" in first
    assert "6 of 11 Linears" in first
    assert dirs.train("run", "run.stop_after_steps=2", "logging.interval_steps=2") == 0
    second = capsys.readouterr().out
    assert "starts from" in second
    assert "step_00000001: step 1, 512 tokens\n" in second
    assert "    run.stop_after_steps: 1 -> 2\n" in second
    assert "    logging.interval_steps: 1 -> 2\n" in second


def test_a_run_that_died_before_its_first_checkpoint_starts_again(dirs: RunDirs):
    assert dirs.train("run", ONE_STEP, "checkpoint.interval_steps=0") == 0
    (dirs.runs / "run" / "checkpoints" / "step_00000001" / "COMPLETE").unlink()
    assert dirs.train("run", ONE_STEP, "scheduler.max_lr=1e-4") == 0  # there is no state that could differ
    assert [row["step"] for row in dirs.rows("run")] == [0, 1]
