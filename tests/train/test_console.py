import io
import logging

import pytest
from rich.console import Console

from nvfp4_train.train import console
from nvfp4_train.train.console import (
    PlainLines,
    ProgressBar,
    build_console,
    describe_eta,
    describe_row,
    short_count,
    show_log,
)

ROW = {"step": 5, "tokens": 2560, "train/loss": 6.13, "train/grad_norm": 1.5, "lr": 3e-3, "tokens_per_second": 1000.0}
EVALUATED = {**ROW, "val/loss": 6.0, "val/loss_bf16": 5.9}


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (512, "512"), (1536, "1.54k"), (2e6, "2M"), (8.1e9, "8.1B"), (15e12, "15T")]
)
def test_counts_have_three_digits_and_a_unit(count: float, text: str):
    assert short_count(count) == text


def test_a_row_is_one_line():
    assert describe_row(EVALUATED, total_tokens=20_480) == (
        "step      5 | tokens 2.56k/20.5k | loss 6.1300 | grad norm 1.500 | lr 3.00e-03 | 1,000 tokens/s | ETA 0:00:18"
        " | val loss 6.0000 | in BF16 5.9000"
    )


def test_the_row_before_the_first_step_has_validation_only():
    row = {"step": 0, "tokens": 0, "val/loss": 6.0, "val/loss_bf16": 5.9}
    assert describe_row(row, total_tokens=100) == "step      0 | tokens 0/100 | val loss 6.0000 | in BF16 5.9000"


def test_the_eta_is_what_remains_at_this_speed():
    assert describe_eta(ROW, total_tokens=2560 + 3_600_000) == "1:00:00"
    assert describe_eta(ROW, total_tokens=1) == "0:00:00"


def test_plain_lines_print_every_row(capsys: pytest.CaptureFixture[str]):
    sink = build_console(progress_bar=True, total_tokens=20_480)  # the output of a test is no terminal
    assert isinstance(sink, PlainLines)
    sink.write(ROW)
    sink.close()
    assert capsys.readouterr().out == describe_row(ROW, total_tokens=20_480) + "\n"


def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    text = io.StringIO()
    monkeypatch.setattr(
        console, "output", Console(file=text, force_terminal=True, width=150, highlight=False, _environ={})
    )
    return text


def test_a_terminal_gets_a_bar_with_loss_speed_and_eta(monkeypatch: pytest.MonkeyPatch):
    text = terminal(monkeypatch)
    sink = build_console(progress_bar=True, total_tokens=5120)
    assert isinstance(sink, ProgressBar)
    sink.write(EVALUATED)
    sink.close()
    shown = text.getvalue()
    assert "50%" in shown
    assert "step 5 loss 6.1300 1,000 tokens/s ETA 0:00:03" in shown
    assert "val loss 6.0000 | in BF16 5.9000" in shown


def test_a_terminal_without_a_bar_gets_lines(monkeypatch: pytest.MonkeyPatch):
    terminal(monkeypatch)
    assert isinstance(build_console(progress_bar=False, total_tokens=1), PlainLines)


def test_what_the_package_logs_is_shown_once(monkeypatch: pytest.MonkeyPatch):
    shown = io.StringIO()
    monkeypatch.setattr(console, "output", Console(file=shown))
    monkeypatch.setattr(logging.getLogger("nvfp4_train"), "handlers", [])
    for _ in range(2):
        show_log()
    logging.getLogger("nvfp4_train.numerics.gemm").info("gemm: auto is %s", "bf16_exact")
    assert shown.getvalue() == "gemm: auto is bf16_exact\n"
