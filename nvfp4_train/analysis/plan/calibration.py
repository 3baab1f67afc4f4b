"""How far the time model is from published runs."""

import math
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from statistics import median
from typing import Any

import yaml  # type: ignore[import-untyped]

from nvfp4_train.analysis.plan.hardware import load_hardware
from nvfp4_train.analysis.plan.layout import Layout, Schedule, filled
from nvfp4_train.analysis.plan.planner import Planner
from nvfp4_train.analysis.plan.step_time import Efficiency, Machine
from nvfp4_train.config.load import load_config


@dataclass(frozen=True, kw_only=True)
class Point:
    """One published run.

    Args:
        model: Key of ``models`` in the file.
        recipe: Key of ``recipes``.
        hardware: Accelerator.
        devices: How many.
        layout: How they share the run.
        tokens: Published tokens per second and device.
        source: Document and URL.
    """

    model: str
    recipe: str
    hardware: str
    devices: int
    layout: Layout
    tokens: float
    source: str


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A published run beside what the model makes of it."""

    point: Point
    modelled: float

    @property
    def error(self) -> float:
        """Relative: 0.1 is 10 % too fast."""
        return self.modelled / self.point.tokens - 1


def load_efficiency() -> Efficiency:
    """Return the fitted constants."""
    return Efficiency(**_read()["efficiency"])


def load_points() -> list[Point]:
    """Return the published runs."""
    data = _read()
    return [_point(item, data["sources"]) for item in data["points"]]


def compare(points: list[Point], efficiency: Efficiency) -> list[Comparison]:
    """Predict published runs."""
    return [Comparison(point=point, modelled=_tokens_per_second(point, efficiency)) for point in points]


def stored_comparisons() -> list[Comparison]:
    """Return what the file says the model makes of the published runs, without running it; a test compares the two."""
    points = load_points()
    return [
        Comparison(point=point, modelled=item["modelled"])
        for point, item in zip(points, _read()["points"], strict=True)
    ]


def typical_error(comparisons: list[Comparison]) -> float:
    """Return the median of the errors' sizes."""
    return median(abs(comparison.error) for comparison in comparisons)


def squared_error(comparisons: list[Comparison]) -> float:
    """Return the mean square of the logarithm of modelled over published: what the constants were fitted to."""
    logs = [math.log(comparison.modelled / comparison.point.tokens) for comparison in comparisons]
    return sum(value * value for value in logs) / len(logs)


def _tokens_per_second(point: Point, efficiency: Efficiency) -> float:
    planner = _planner(point.model, point.recipe)
    planner.machine = Machine(hardware=load_hardware(point.hardware), efficiency=efficiency)
    layout = point.layout
    seconds = planner.step_time(layout).total
    return layout.global_batch_size * layout.sequence_length / seconds / layout.devices


@cache
def _planner(model: str, recipe: str) -> Planner:
    """A planner remembers what blocks do, and that depends on neither the hardware nor the constants."""
    data = _read()
    cfg = load_config([*_overrides(data["models"][model]), *_overrides(data["recipes"][recipe])]).cfg
    machine = Machine(hardware=load_hardware("H100"), efficiency=load_efficiency())
    return Planner(
        model=cfg.model, recipe=cfg.recipe, optimizer=cfg.optimizer, machine=machine, total_tokens=cfg.run.tokens
    )


def _overrides(values: dict[str, Any]) -> list[str]:
    found = []
    for key, value in values.items():
        if key == "blocks":
            letters, times = value
            found.append(f"model.pattern='{letters * times}'")
        else:
            found.append(f"{key}={str(value).lower() if isinstance(value, bool) else value}")
    return found


def _point(item: dict[str, Any], sources: dict[str, dict[str, str]]) -> Point:
    given = dict(item["layout"])
    layout = Layout(
        schedule=Schedule.interleaved if given.get("num_virtual_stages", 1) > 1 else Schedule.one_f_one_b,
        micro_batch_size=given.pop("micro_batch_size", 1),
        global_batch_size=item["batch"],
        sequence_length=item["length"],
        reshards=given.pop("reshards", False),
        **given,
    )
    source = sources[item["source"]]
    return Point(
        model=item["model"],
        recipe=item["recipe"],
        hardware=item["hardware"],
        devices=item["devices"],
        layout=filled(replace(layout, dp_shard=1), devices=item["devices"]),
        tokens=item["tokens"],
        source=f"{source['name']}, {source['url']}",
    )


@cache
def _read() -> dict[str, Any]:
    text = files("nvfp4_train.analysis.plan").joinpath("calibration.yaml").read_text(encoding="utf-8")
    data: dict[str, Any] = yaml.safe_load(text)
    return data
