"""Figures."""

from pathlib import Path
from typing import Any

from nvfp4_train.analysis.runs import Run


class PlotsMissingError(ValueError):
    """The package that draws is not installed."""


def plot_loss_curve(run: Run, *, path: Path) -> None:
    """Draw training loss and both validation losses over tokens into a PNG.

    Raises:
        PlotsMissingError: matplotlib is not installed.
    """
    figure = _new_figure(figsize=(8, 4.5))
    axes = figure.subplots()
    styles: dict[str, dict[str, Any]] = {
        "train/loss": {"label": "training", "color": "0.6", "linewidth": 1},
        "val/loss": {"label": "validation, recipe on", "color": "C0", "marker": "o", "markersize": 4},
        "val/loss_bf16": {
            "label": "validation, BF16",
            "color": "C1",
            "marker": "x",
            "linestyle": "--",
            "markersize": 5,
        },
    }
    for key, style in styles.items():
        series = run.series(key)
        axes.plot([tokens / 1e6 for tokens in series.tokens], series.values, **style)
    axes.set_xlabel("tokens (millions)")
    axes.set_ylabel("cross-entropy (nats per token)")
    axes.set_title(run.path.name)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def plot_sources(run: Run, *, path: Path) -> None:
    """Draw what each source of the data has given, in tokens and in epochs, over the run into a PNG.

    Raises:
        PlotsMissingError: matplotlib is not installed.
    """
    figure = _new_figure(figsize=(8, 7))
    given, epochs = figure.subplots(2, sharex=True)
    for name in run.sources():
        series = run.series(f"data/{name}/tokens")
        millions = [tokens / 1e6 for tokens in series.tokens]
        given.plot(millions, [tokens / 1e6 for tokens in series.values], label=name)
        epochs.plot(millions, run.series(f"data/{name}/epochs").values, label=name)
    given.set_ylabel("tokens given (millions)")
    epochs.set_ylabel("epochs")
    epochs.set_xlabel("tokens (millions)")
    given.set_title(f"{run.path.name}: data by source")
    for axes in (given, epochs):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=150)


def _new_figure(*, figsize: tuple[float, float]) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotsMissingError("figures need the package matplotlib: pip install 'nvfp4-train[plots]'") from error
    return Figure(figsize=figsize, layout="constrained")
