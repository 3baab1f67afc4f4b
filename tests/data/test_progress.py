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
