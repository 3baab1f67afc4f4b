"""Numbers that are no numbers end a run, by name, and leave nothing poisoned behind."""

import math
from typing import Any

import pytest
import torch

from nvfp4_train.train import job
from tests.support.runs import RunDirs


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> str:
    """Put a NaN into a weight of the engine that the run builds."""
    name = "blocks.2.mixer.up_proj"
    build = job.build_engine

    def build_poisoned(*args: Any, **kwargs: Any) -> Any:
        engine = build(*args, **kwargs)
        with torch.no_grad():
            engine.model.get_parameter(f"{name}.weight").to_local()[3, 5] = math.nan  # type: ignore[operator]
        return engine

    monkeypatch.setattr(job, "build_engine", build_poisoned)
    return name


@pytest.mark.parametrize("recipe", ["nvfp4", "bf16"])
def test_a_nan_weight_stops_the_run_with_the_layers_name(
    dirs: RunDirs, poison: str, recipe: str, capsys: pytest.CaptureFixture[str]
):
    assert dirs.train("poisoned", f"recipe={recipe}") == 1
    told = capsys.readouterr().err
    assert "validation loss nan" in told
    assert f"first in the forward pass: {poison}, operand weight" in told
    assert "Traceback" not in told
    assert dirs.checkpoints("poisoned") == []
    assert dirs.rows("poisoned") == []


def test_a_nan_that_appears_while_training_is_never_saved(
    dirs: RunDirs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    build = job.build_engine

    def build_failing(*args: Any, **kwargs: Any) -> Any:
        engine = build(*args, **kwargs)
        module = engine.model.blocks[2].mixer.up_proj
        module.register_full_backward_pre_hook(
            lambda _, gradients: (gradients[0] * math.nan,) if engine.step == 5 else None
        )
        return engine

    monkeypatch.setattr(job, "build_engine", build_failing)
    assert dirs.train("failing", "checkpoint.interval_steps=1") == 1
    told = capsys.readouterr().err
    assert "step 6: training loss" in told
    assert "gradient norm nan" in told
    assert "first in the backward pass: blocks.2.mixer.up_proj: dgrad.dy" in told
    assert dirs.checkpoints("failing")[-1] == "step_00000005"
    assert dirs.rows("failing")[-1]["step"] == 5


def test_weights_that_an_update_made_infinite_are_never_saved(dirs: RunDirs, capsys: pytest.CaptureFixture[str]):
    absurd = ["scheduler.max_lr=1e39", "scheduler.warmup_tokens=0", "checkpoint.interval_steps=1"]
    assert dirs.train("overflow", *absurd) == 1
    assert "is not finite after the update; it is not saved" in capsys.readouterr().err
    assert dirs.checkpoints("overflow") == []
