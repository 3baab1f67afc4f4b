import sys
from pathlib import Path

import pytest

from nvfp4_train.analysis.figures import PlotsMissingError, plot_loss_curve, plot_sources
from nvfp4_train.analysis.runs import Run, load_run
from tests.support.run_files import write_run


def test_the_curve_is_a_png_with_three_lines_and_labelled_axes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    drawn = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *args, **kwargs: (drawn.append(self), save(self, *args, **kwargs))
    )
    path = tmp_path / "loss.png"
    plot_loss_curve(load_run(write_run(tmp_path / "run")), path=path)
    assert path.read_bytes().startswith(b"\x89PNG")
    [axes] = drawn[0].axes
    assert [list(line.get_ydata()) for line in axes.lines] == [[5.5, 5.0, 4.5], [6.0, 4.0], [5.9, 3.9]]
    assert list(axes.lines[0].get_xdata()) == [0.0008, 0.0016, 0.0024]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("tokens (millions)", "cross-entropy (nats per token)")
    assert (axes.get_xscale(), axes.get_yscale()) == ("linear", "linear")


def test_sources_are_drawn_in_tokens_and_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kwargs: drawn.append(self))
    rows = [
        {"step": step, "tokens": 10**6 * step, "data/web/tokens": 7e5 * step, "data/web/epochs": 0.1 * step,
         "data/code/tokens": 3e5 * step, "data/code/epochs": 0.5 * step}
        for step in (1, 2)
    ]  # fmt: skip
    plot_sources(Run(path=tmp_path, rows=rows, num_parameters=1, coverage={}), path=tmp_path / "data.png")
    given, epochs = drawn[0].axes
    assert [line.get_label() for line in given.lines] == ["web", "code"]
    assert [list(line.get_ydata()) for line in given.lines] == [[0.7, 1.4], [0.3, 0.6]]
    assert [list(line.get_ydata()) for line in epochs.lines] == [[0.1, 0.2], [0.5, 1.0]]
    assert list(epochs.lines[0].get_xdata()) == [1.0, 2.0]
    assert (given.get_ylabel(), epochs.get_ylabel()) == ("tokens given (millions)", "epochs")


def test_a_run_without_rows_has_an_empty_figure(tmp_path: Path):
    pytest.importorskip("matplotlib")
    plot_loss_curve(Run(path=tmp_path, rows=[], num_parameters=1, coverage={}), path=tmp_path / "loss.png")
    assert (tmp_path / "loss.png").exists()


def test_a_missing_matplotlib_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PlotsMissingError, match=r"pip install 'nvfp4-train\[plots\]'"):
        plot_loss_curve(load_run(write_run(tmp_path / "run")), path=tmp_path / "loss.png")
