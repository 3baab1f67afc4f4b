"""The folder of a run that never ran."""

import json
from pathlib import Path


def performance(tokens_per_second: float) -> dict[str, float]:
    """The metrics of a device with a peak of 1 TFLOP/s, for a model of 1 GFLOP per token."""
    teraflops = tokens_per_second / 1e3
    return {"perf/model_tflops_per_device": teraflops, "perf/fp4_flops_share": 0.5, "perf/mfu": teraflops}


ROWS: list[dict[str, int | float]] = [
    {"step": 0, "tokens": 0, "val/loss": 6.0, "val/loss_bf16": 5.9},
    {"step": 1, "tokens": 800, "train/loss": 5.5, "tokens_per_second": 100.0, **performance(100.0)},
    {"step": 2, "tokens": 1600, "train/loss": 5.0, "tokens_per_second": 100.0, **performance(100.0)},
    {
        "step": 3,
        "tokens": 2400,
        "train/loss": 4.5,
        "tokens_per_second": 400.0,
        **performance(400.0),
        "val/loss": 4.0,
        "val/loss_bf16": 3.9,
    },
]


def write_run(path: Path) -> Path:
    """Write what analysis reads of a run."""
    path.mkdir()
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (path / "model.json").write_text(json.dumps({"num_parameters": 1234}))
    (path / "coverage.json").write_text(json.dumps({"flops_share_low_precision": 0.625}))
    return path
