"""Accelerators: peaks, memory, links and prices, each with its source."""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from importlib.resources import files
from typing import Any

import yaml  # type: ignore[import-untyped]

from nvfp4_train.config.problem import ConfigError, Problem
from nvfp4_train.config.suggest import choice_fix
from nvfp4_train.numerics.spec import Format


class Label(StrEnum):
    """Where a figure comes from."""

    measured = "measured"  # by running code of this package
    published = "published"  # read in a named source
    modelled = "modelled"  # computed, with assumptions


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number of an accelerator.

    Args:
        value: In the unit that ``hardware.yaml`` gives; None where the accelerator has no such thing.
        label: Whether it was read or reasoned.
        source: Document and URL.
        note: The reasoning behind a modelled number.
    """

    value: float | None
    label: Label
    source: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One accelerator; see ``hardware.yaml`` for the units."""

    name: str
    bf16: float
    fp8: float | None
    fp4: float | None
    fp4_formats: tuple[Format, ...]
    memory: float
    memory_bandwidth: float
    domain: int
    domain_bandwidth: float
    network: float
    price: float
    figures: dict[str, Figure] = field(compare=False)

    def with_price(self, price: float) -> "Hardware":
        """Return the same accelerator at a price of the user's, in USD per GPU hour."""
        figure = Figure(value=price, label=Label.published, source="--price")
        return replace(self, price=price, figures={**self.figures, "price": figure})


def hardware_names() -> list[str]:
    """Return the accelerators that the file describes."""
    return list(_read()["accelerators"])


def load_hardware(name: str) -> Hardware:
    """Return an accelerator by its name, whatever the case.

    Raises:
        ConfigError: for one that is not in the file.
    """
    data = _read()
    known = {key.lower(): key for key in data["accelerators"]}
    if name.lower() not in known:
        names = list(data["accelerators"])
        rule = f"must be one of {', '.join(names)}"
        raise ConfigError([Problem(key="--hardware", value=name, rule=rule, fix=choice_fix(name.upper(), names))])
    entry = data["accelerators"][known[name.lower()]]
    figures = {key: _figure(item, data["sources"]) for key, item in entry.items() if key != "fp4_format"}
    values: dict[str, Any] = {key: figure.value for key, figure in figures.items()}
    formats = tuple(Format(text) for text in entry["fp4_format"])
    return Hardware(name=known[name.lower()], fp4_formats=formats, figures=figures, **values)


def _figure(item: dict[str, Any], sources: dict[str, dict[str, str]]) -> Figure:
    source = sources[item["source"]]
    return Figure(
        value=item["value"],
        label=Label(item["label"]),
        source=f"{source['name']}, {source['url']}",
        note=item.get("note", ""),
    )


@cache
def _read() -> dict[str, Any]:
    text = files("nvfp4_train.analysis.plan").joinpath("hardware.yaml").read_text(encoding="utf-8")
    data: dict[str, Any] = yaml.safe_load(text)
    return data
