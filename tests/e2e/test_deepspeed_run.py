"""A run with DeepSpeed is a run like any other: its rows, its checkpoints, and the way to the other engine and back."""

import shutil

import pytest

from nvfp4_train.engine.convert import convert_checkpoint
from tests.support.deepspeed import needs_deepspeed
from tests.support.runs import RunDirs

pytestmark = [needs_deepspeed, pytest.mark.distributed, pytest.mark.slow]

FP32 = ("recipe=fp32", "checkpoint.keep_last=2")


@pytest.fixture(scope="module")
def runs(module_dirs: RunDirs) -> RunDirs:
    """Eight steps of the torch engine; four of DeepSpeed, then two in another stage, then two of the torch engine."""
    assert module_dirs.train("torch", *FP32, "run.stop_after_steps=8") == 0
    for steps, stage in ((4, 3), (6, 2)):
        options = ("engine=deepspeed", f"engine.zero_stage={stage}", f"run.stop_after_steps={steps}")
        done = module_dirs.run("deepspeed", *FP32, *options, "checkpoint.interval_steps=2", ranks=2)
        assert done.returncode == 0, done.stderr
    shutil.copytree(module_dirs.runs / "deepspeed", module_dirs.runs / "converted")
    folder = module_dirs.runs / "converted/checkpoints"
    shutil.rmtree(folder)
    convert_checkpoint(module_dirs.runs / "deepspeed/checkpoints/step_00000006", folder / "step_00000006")
    assert module_dirs.train("converted", *FP32, "run.stop_after_steps=8") == 0
    return module_dirs


def test_losses_norms_and_evaluations_are_those_of_the_torch_engine(runs: RunDirs):
    wanted = runs.rows("torch")
    assert [row["step"] for row in runs.rows("converted")] == [row["step"] for row in wanted]
    compared = 0
    for found, row in zip(runs.rows("converted"), wanted, strict=True):
        for key in row.keys() & {"train/loss", "train/grad_norm", "val/loss", "val/loss_bf16"}:
            if key in found:
                compared += 1
                assert found[key] == pytest.approx(row[key], rel=1e-5), (row["step"], key)
    assert compared >= 16


def test_checkpoints_are_named_kept_and_removed_as_usual(runs: RunDirs):
    assert runs.checkpoints("deepspeed") == ["step_00000004", "step_00000006"]


def test_the_other_engine_refuses_the_checkpoint_and_names_the_converter(runs: RunDirs, capsys):
    assert runs.train("deepspeed", *FP32, "run.stop_after_steps=8") == 1
    assert "scripts/convert_checkpoint.py" in capsys.readouterr().err
