import io
import re

from rich.console import Console

from nvfp4_train.data import progress


def test_lines_without_a_terminal(capsys, monkeypatch):
    clock = iter(range(0, 1000, 6))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    with progress.show_progress("tokenizing", total=200) as advance:
        for _ in range(4):
            advance(50)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "data: tokenizing"
    assert lines[1:-1]
    assert all(re.fullmatch(r"data: tokenizing: \d+ %", line) for line in lines[1:-1])
    assert re.fullmatch(r"data: tokenizing: done in \d+\.\d s", lines[-1])


def test_bar_on_a_terminal(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda: Console(file=screen, force_terminal=True, width=120))
    with progress.show_progress("tokenizing", total=200) as advance:
        advance(50)
        advance(150)
    assert "100%" in screen.getvalue()
    assert "tokenizing" in screen.getvalue()


def test_announcement_is_one_line_as_written(capsys):
    message = "a [bold] path/" + "x" * 200
    progress.announce(message)
    assert capsys.readouterr().out == f"data: {message}\n"


def test_meter_tells_tokens_speed_and_the_time_that_is_left(monkeypatch):
    monkeypatch.setattr(progress.time, "monotonic", lambda: 100.0)
    meter = progress.TokenMeter("tokenizing", done=0)
    meter.advance(0.25, 3_000_000)
    assert meter.line(110.0) == "25 %, 3.0 M tokens, 0.30 M tokens/s, 0:00:30 left"


def test_meter_counts_speed_and_time_from_where_it_began(monkeypatch):
    monkeypatch.setattr(progress.time, "monotonic", lambda: 100.0)
    meter = progress.TokenMeter("tokenizing", done=9_000_000)
    meter.advance(0.5, 1_000_000)
    meter.advance(0.6, 1_000_000)
    assert meter.line(110.0) == "60 %, 11.0 M tokens, 0.20 M tokens/s, 0:00:40 left"


def test_meter_without_a_known_end():
    meter = progress.TokenMeter("tokenizing", done=0)
    meter.advance(None, 1_000_000)
    assert "left" not in meter.line(meter._started + 1)


def test_meter_lines_without_a_terminal(capsys, monkeypatch):
    clock = iter(range(0, 1000, 6))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    with progress.TokenMeter("tokenizing", done=0).shown() as meter:
        for step in range(4):
            meter.advance(step / 4, 1_000_000)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "data: tokenizing"
    assert len(lines) > 2
    assert lines[-1].startswith("data: tokenizing: 4,000,000 tokens in")


def test_meter_bar_on_a_terminal(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda **_: Console(file=screen, force_terminal=True, width=120))
    with progress.TokenMeter("tokenizing", done=0).shown() as meter:
        meter.advance(0.5, 1_000_000)
        meter.advance(1.0, 1_000_000)
    assert "2.0 M tokens" in screen.getvalue()
