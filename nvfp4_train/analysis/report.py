"""What a finished run tells its user."""

from dataclasses import asdict, dataclass
from pathlib import Path

from nvfp4_train.analysis.figures import PlotsMissingError, plot_loss_curve, plot_sources
from nvfp4_train.analysis.runs import Run, Series, load_run
from nvfp4_train.data.write import write_json


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A loss at the start and at the end of a run; None where it was not logged."""

    start: float | None
    end: float | None

    def __str__(self) -> str:
        start, end = ("not logged" if value is None else f"{value:.4f}" for value in (self.start, self.end))
        return f"{start} -> {end}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """The numbers of a run that people ask for first.

    Args:
        num_parameters: Number of parameters.
        step: Optimizer steps.
        tokens: Tokens trained on.
        train_loss: Training loss of the first and the last logged step.
        val_loss: Validation loss with the recipe on, before the first step and of the final weights.
        val_loss_bf16: The same in BF16, from the same weights.
        tokens_per_second: Of all ranks together, without evaluation and saving; None if no step was logged.
        model_tflops_per_device: Mean model TFLOP/s of one device; None if no step was logged.
        mfu: Mean model FLOPs utilization; None where the peak of the device is not known.
        fp4_share_of_flops: Share of all model FLOPs with both operands in 4 bits; None if no step was logged.
        fp4_share_of_linear_flops: Share of the Linears' FLOPs, forward and backward, with both operands in 4 bits.
        run_folder: Where everything is.
        figure: PNG of the loss curve, or why there is none.
    """

    num_parameters: int
    step: int
    tokens: int
    train_loss: Change
    val_loss: Change
    val_loss_bf16: Change
    tokens_per_second: float | None
    model_tflops_per_device: float | None
    mfu: float | None
    fp4_share_of_flops: float | None
    fp4_share_of_linear_flops: float
    run_folder: str
    figure: str


def report_run(path: Path) -> str:
    """Draw the loss curve of a run folder, write its ``summary.json`` and return the summary as text.

    Where the data have several sources, ``data.png`` shows what each has given.

    Raises:
        ValueError: ``path`` is not the folder of a run.
    """
    run = load_run(path)
    figure = str(path / "loss.png")
    try:
        plot_loss_curve(run, path=path / "loss.png")
        if len(run.sources()) > 1:
            plot_sources(run, path=path / "data.png")
    except PlotsMissingError as error:
        figure = f"none: {error}"
    summary = summarize(run, figure=figure)
    write_json(path / "summary.json", asdict(summary))
    return format_summary(summary)


def summarize(run: Run, *, figure: str) -> RunSummary:
    """Take the numbers of a summary from a run; ``figure`` is the path of its loss curve."""
    last = run.rows[-1] if run.rows else {}
    return RunSummary(
        num_parameters=run.num_parameters,
        step=int(last.get("step", 0)),
        tokens=int(last.get("tokens", 0)),
        train_loss=_change(run.series("train/loss")),
        val_loss=_change(run.series("val/loss")),
        val_loss_bf16=_change(run.series("val/loss_bf16")),
        tokens_per_second=run.tokens_per_second,
        model_tflops_per_device=run.mean_over_time("perf/model_tflops_per_device"),
        mfu=run.mean_over_time("perf/mfu"),
        fp4_share_of_flops=run.mean_over_time("perf/fp4_flops_share"),
        fp4_share_of_linear_flops=run.coverage["flops_share_low_precision"],
        run_folder=str(run.path),
        figure=figure,
    )


def format_summary(summary: RunSummary) -> str:
    """Write a summary for a person, one fact a line."""
    speed = summary.tokens_per_second
    facts = {
        "parameters": f"{summary.num_parameters:,}",
        "tokens": f"{summary.tokens:,} in {summary.step:,} steps",
        "training loss": summary.train_loss,
        "validation loss": f"{summary.val_loss} with the recipe on",
        "": f"{summary.val_loss_bf16} in BF16, from the same weights",
        "throughput": "not logged" if speed is None else f"{speed:,.0f} tokens/s",
        "model FLOP/s": _describe_flops(summary),
        "Linear FLOPs in FP4": _describe_fp4(summary),
        "run folder": summary.run_folder,
        "loss curve": summary.figure,
    }
    width = max(map(len, facts))
    return "\n".join(f"{name:<{width}}  {fact}" for name, fact in facts.items())


def _change(series: Series) -> Change:
    values = series.values
    return Change(start=values[0] if values else None, end=values[-1] if values else None)


def _describe_flops(summary: RunSummary) -> str:
    if summary.model_tflops_per_device is None:
        return "not logged"
    utilization = "the peak of the device is not known" if summary.mfu is None else f"MFU {100 * summary.mfu:.1f} %"
    return f"{summary.model_tflops_per_device:.3g} TFLOP/s per device; {utilization}"


def _describe_fp4(summary: RunSummary) -> str:
    of_linears = f"{100 * summary.fp4_share_of_linear_flops:.1f} %"
    if summary.fp4_share_of_flops is None:
        return of_linears
    return f"{of_linears}; {100 * summary.fp4_share_of_flops:.1f} % of all model FLOPs"
