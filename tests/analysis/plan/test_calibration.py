"""Published runs: complete, and what the file says of the model is what the model says."""

import pytest

from nvfp4_train.analysis.plan.calibration import (
    compare,
    load_efficiency,
    load_points,
    squared_error,
    stored_comparisons,
    typical_error,
)


def test_the_asked_runs_are_there():
    points = {(point.model, point.recipe, point.hardware): point for point in load_points()}
    assert points["nemotron_3_super", "nvfp4_super", "GB200"].tokens == 7168
    assert points["nemotron_3_super", "mxfp8", "GB200"].tokens == 7040
    gain = points["llama3_405b", "nvfp4", "GB200"].tokens / points["llama3_405b", "mxfp8", "GB200"].tokens
    assert gain == pytest.approx(1.49, abs=0.005)


def test_every_point_has_a_source_and_fills_its_devices():
    for point in load_points():
        assert "https://" in point.source
        assert point.layout.devices == point.devices
        assert point.layout.global_batch_size % (point.layout.micro_batch_size * point.layout.dp) == 0


def test_the_stored_predictions_are_those_of_the_model():
    """After a change of model, constants or points: run `scripts/plan.py --calibration` and store what it prints."""
    found = compare(load_points(), load_efficiency())
    stored = stored_comparisons()
    for new, old in zip(found, stored, strict=True):
        assert new.modelled == pytest.approx(old.modelled, rel=2e-3), new.point


def test_the_errors_are_what_the_documents_say():
    stored = stored_comparisons()
    assert typical_error(stored) < 0.08
    assert squared_error(stored) ** 0.5 < 0.15
    assert sum(abs(item.error) > 0.25 for item in stored) <= 2


def test_efficiencies_are_shares():
    efficiency = load_efficiency()
    shares = (
        "gemm_bf16",
        "gemm_fp8",
        "gemm_fp4",
        "gemm_memory",
        "attention",
        "scan",
        "memory",
        "quantize",
        "link",
        "overlap",
    )
    assert all(0 < getattr(efficiency, name) <= 1 for name in shares)
