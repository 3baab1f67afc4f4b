import json
import sys
from pathlib import Path

import pytest

from nvfp4_train.analysis.report import Change, format_summary, report_run, summarize
from nvfp4_train.analysis.runs import Run
from tests.support.run_files import ROWS, write_run


def test_the_summary_says_what_people_ask_for(tmp_path: Path):
    pytest.importorskip("matplotlib")
    path = write_run(tmp_path / "run")
    assert report_run(path) == (
        "parameters           1,234\n"
        "tokens               2,400 in 3 steps\n"
        "training loss        5.5000 -> 4.5000\n"
        "validation loss      6.0000 -> 4.0000 with the recipe on\n"
        "                     5.9000 -> 3.9000 in BF16, from the same weights\n"
        "throughput           133 tokens/s\n"
        "model FLOP/s         0.133 TFLOP/s per device; MFU 13.3 %\n"
        "Linear FLOPs in FP4  62.5 %; 50.0 % of all model FLOPs\n"
        f"run folder           {path}\n"
        f"loss curve           {path / 'loss.png'}"
    )
    assert (path / "loss.png").is_file()


def test_the_summary_is_a_file_too(tmp_path: Path):
    path = write_run(tmp_path / "run")
    report_run(path)
    summary = json.loads((path / "summary.json").read_text())
    assert summary["val_loss"] == {"start": 6.0, "end": 4.0}
    assert summary["val_loss_bf16"] == {"start": 5.9, "end": 3.9}
    assert summary["train_loss"] == {"start": 5.5, "end": 4.5}
    assert summary["num_parameters"] == 1234
    assert summary["fp4_share_of_linear_flops"] == 0.625
    assert summary["fp4_share_of_flops"] == 0.5
    assert summary["mfu"] == summary["model_tflops_per_device"] == pytest.approx(2400 / 18 / 1000)
    assert summary["run_folder"] == str(path)


def test_without_matplotlib_only_the_figure_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    path = write_run(tmp_path / "run")
    assert "loss curve           none: figures need the package matplotlib" in report_run(path)
    assert not (path / "loss.png").exists()


def test_a_run_that_logged_nothing_has_a_summary(tmp_path: Path):
    run = Run(path=tmp_path, rows=[], num_parameters=1, coverage={"flops_share_low_precision": 0.0})
    summary = summarize(run, figure="none")
    assert summary.train_loss == Change(start=None, end=None)
    assert str(summary.train_loss) == "not logged -> not logged"
    assert summary.tokens_per_second is summary.model_tflops_per_device is summary.mfu is None
    assert "model FLOP/s         not logged" in format_summary(summary)
    assert "Linear FLOPs in FP4  0.0 %\n" in format_summary(summary)


def test_without_a_peak_the_speed_remains(tmp_path: Path):
    rows = [{key: value for key, value in row.items() if key != "perf/mfu"} for row in ROWS]
    run = Run(path=tmp_path, rows=rows, num_parameters=1, coverage={"flops_share_low_precision": 0.0})
    summary = summarize(run, figure="none")
    assert summary.mfu is None
    assert "0.133 TFLOP/s per device; the peak of the device is not known" in format_summary(summary)
