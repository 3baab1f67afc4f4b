from pathlib import Path

import pytest

from nvfp4_train.analysis.runs import Run, load_run
from tests.support.run_files import ROWS, write_run


def test_a_run_folder_is_read(tmp_path: Path):
    run = load_run(write_run(tmp_path / "run"))
    assert run.rows == ROWS
    assert run.num_parameters == 1234
    assert run.coverage["flops_share_low_precision"] == 0.625


def test_a_series_has_the_rows_with_its_metric(tmp_path: Path):
    run = load_run(write_run(tmp_path / "run"))
    series = run.series("val/loss")
    assert (series.steps, series.tokens, series.values) == ([0, 3], [0, 2400], [6.0, 4.0])
    assert run.series("val/nothing").values == []


def test_sources_are_named_once(tmp_path: Path):
    rows = [{"step": 0, "val/loss": 1.0}, {"data/web/tokens": 1, "data/web/epochs": 0.1}, {"data/code/tokens": 1}]
    run = Run(path=tmp_path, rows=rows, num_parameters=1, coverage={})
    assert run.sources() == ["web", "code"]
    assert load_run(write_run(tmp_path / "run")).sources() == []


def test_throughput_is_tokens_over_the_time_that_the_rows_took(tmp_path: Path):
    # 800 tokens at 100, 100 and 400 per second: 8 s, 8 s and 2 s
    assert load_run(write_run(tmp_path / "run")).tokens_per_second == pytest.approx(2400 / 18)


def test_a_mean_over_time_counts_slow_rows_longer(tmp_path: Path):
    run = load_run(write_run(tmp_path / "run"))
    assert run.mean_over_time("train/loss") == pytest.approx((8 * 5.5 + 8 * 5.0 + 2 * 4.5) / 18)
    assert run.mean_over_time("val/loss") == 4.0  # the row before the first step took no time
    assert run.mean_over_time("no/such") is None


def test_a_run_without_steps_has_no_throughput(tmp_path: Path):
    run = Run(path=tmp_path, rows=ROWS[:1], num_parameters=1, coverage={})
    assert run.tokens_per_second is None


def test_a_fork_counts_from_its_first_row(tmp_path: Path):
    first = {"step": 10, "tokens": 1000, "val/loss": 5.0}
    second = {"step": 11, "tokens": 1100, "tokens_per_second": 50.0}
    run = Run(path=tmp_path, rows=[first, second], num_parameters=1, coverage={})
    assert run.tokens_per_second == 50.0


def test_another_folder_is_refused_with_what_it_lacks(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"is not the folder of a run: it has no model.json and no coverage.json"):
        load_run(tmp_path)
