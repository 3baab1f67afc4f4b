"""A plan as text and as plain values; every figure says whether it was measured, published or modelled."""

from collections.abc import Iterable
from typing import Any

from nvfp4_train.analysis.plan.calibration import Comparison, typical_error
from nvfp4_train.analysis.plan.hardware import Hardware, Label
from nvfp4_train.analysis.plan.memory import LABELS
from nvfp4_train.analysis.plan.planner import Plan
from nvfp4_train.analysis.plan.search import Found
from nvfp4_train.config.parallel import ActivationCheckpoint

GB, TB, TFLOPS = 1e9, 1e12, 1e12
MAX_REASONS = 8


def format_plan(plan: Plan, *, kept: dict[ActivationCheckpoint, float], comparisons: list[Comparison]) -> str:
    """Return a plan as text.

    Args:
        plan: The plan.
        kept: Bytes of activations of the rank that holds most, by what is kept.
        comparisons: Published runs beside what the time model makes of them.
    """
    sections = [
        _heading(plan),
        _stages(plan),
        _memory(plan, kept),
        _traffic(plan),
        _work(plan),
        _time(plan),
        _calibration(plan, comparisons),
        _hardware(plan.machine.hardware),
    ]
    return "\n\n".join(sections)


def format_search(found: Found) -> str:
    """Return the layouts of a search and why others do not fit."""
    head = ["", "layout", "memory", "step", "tokens/s/device", "days", "USD"]
    rows = [
        [
            f"{number}.",
            plan.layout.describe(),
            f"{plan.peak_memory / GB:.0f} GB",
            f"{plan.time.total:.3f} s",
            f"{plan.tokens_per_second / plan.layout.devices:,.0f}",
            f"{plan.days:,.1f}",
            f"{plan.cost:,.0f}",
        ]
        for number, plan in enumerate(found.plans, start=1)
    ]
    lines = [
        f"Best layouts of {found.looked_at:,} ({Label.modelled}, the first is planned below)",
        _table([head, *rows]),
    ]
    if not found.plans:
        lines = [f"None of {found.looked_at:,} layouts fits."]
    lines.append("\nWhy others do not fit (N stands for a number; an example each)")
    lines += [f"  {item.count:>5}  {item.reason}: {item.example}" for item in found.rejected[:MAX_REASONS]]
    rest = sum(item.count for item in found.rejected[MAX_REASONS:])
    return "\n".join(lines + ([f"  {rest:>5}  other reasons, see --json"] if rest else []))


def format_calibration(comparisons: list[Comparison]) -> str:
    """Return every published run beside what the time model makes of it."""
    head = ["model", "recipe", "devices", "layout", "published", "modelled", "error"]
    rows = [
        [
            item.point.model,
            item.point.recipe,
            f"{item.point.devices} {item.point.hardware}",
            item.point.layout.describe(),
            f"{item.point.tokens:,.0f}",
            f"{item.modelled:,.0f}",
            f"{100 * item.error:+.0f} %",
        ]
        for item in comparisons
    ]
    sources = "\n".join(dict.fromkeys(item.point.source for item in comparisons))
    return f"Tokens per second and device\n{_table([head, *rows])}\nSources:\n{sources}"


def plan_values(
    plan: Plan, *, kept: dict[ActivationCheckpoint, float], comparisons: list[Comparison]
) -> dict[str, Any]:
    """Return a plan as plain values for JSON; arguments as for ``format_plan``."""
    return {
        "layout": _layout_values(plan),
        "hardware": _hardware_values(plan.machine.hardware),
        "stages": [
            {
                "blocks": [item.stage.blocks.start, item.stage.blocks.stop],
                "num_parameters": item.num_parameters,
                "flops": item.flops,
                "kept_blocks": item.kept_blocks,
            }
            for item in plan.stages
        ],
        "memory_bytes": [{**memory.by_kind, "total": memory.total, "host": memory.host} for memory in plan.memory],
        "memory_labels": {kind: label.value for kind, label in LABELS.items()},
        "activation_bytes": {mode.value: size for mode, size in kept.items()},
        "fits": plan.fits,
        "traffic": [
            {"axis": item.axis, "what": item.what, "bytes": item.bytes, "link": item.link.value}
            for item in plan.traffic
        ],
        "model_flops": plan.flops,
        "low_precision_flops": plan.low_precision_flops,
        "step_seconds": {**plan.time.by_part, "total": plan.time.total, "label": Label.modelled.value},
        "tokens_per_second": plan.tokens_per_second,
        "days": plan.days,
        "cost_usd": plan.cost,
        "calibration": [
            {
                "model": item.point.model,
                "recipe": item.point.recipe,
                "hardware": item.point.hardware,
                "devices": item.point.devices,
                "published": item.point.tokens,
                "modelled": item.modelled,
                "error": item.error,
                "source": item.point.source,
            }
            for item in comparisons
        ],
    }


def search_values(found: Found) -> dict[str, Any]:
    """Return a search as plain values for JSON."""
    return {
        "looked_at": found.looked_at,
        "layouts": [
            {
                **_layout_values(plan),
                "memory_bytes": plan.peak_memory,
                "step_seconds": plan.time.total,
                "days": plan.days,
                "cost_usd": plan.cost,
            }
            for plan in found.plans
        ],
        "rejected": [{"reason": item.reason, "count": item.count, "example": item.example} for item in found.rejected],
    }


def _layout_values(plan: Plan) -> dict[str, Any]:
    layout = plan.layout
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "num_virtual_stages", "micro_batch_size")
    values = {name: getattr(layout, name) for name in names}
    return {
        **values,
        "schedule": layout.schedule.value,
        "checkpoint": layout.checkpoint.value,
        "reshards": layout.reshards,
        "num_microbatches": layout.num_microbatches,
        "devices": layout.devices,
    }


def _hardware_values(hardware: Hardware) -> dict[str, Any]:
    return {
        "name": hardware.name,
        **{
            name: {"value": item.value, "label": item.label.value, "source": item.source, "note": item.note}
            for name, item in hardware.figures.items()
        },
    }


def _heading(plan: Plan) -> str:
    layout = plan.layout
    fits = "fits" if plan.fits else "DOES NOT FIT"
    return (
        f"{layout.devices} x {plan.machine.hardware.name}: {layout.describe()}\n"
        f"{layout.num_microbatches} microbatches of {layout.tokens:,} tokens a rank and step; "
        f"{plan.peak_memory / GB:.1f} of {plan.machine.hardware.memory / GB:.0f} GB: {fits}"
    )


def _stages(plan: Plan) -> str:
    head = ["stage", "rank", "blocks", "parameters", "FLOPs/step", "memory of its rank", "blocks kept in BF16"]
    rows = []
    for item in plan.stages:
        rank = item.stage.rank
        blocks = item.stage.blocks
        extras = (["embedding"] if item.stage.is_first else []) + (["head"] if item.stage.is_last else [])
        rows.append(
            [
                str(item.stage.index),
                str(rank),
                " + ".join([f"{blocks.start}-{blocks.stop - 1}", *extras]),
                f"{item.num_parameters / 1e9:.3f} B",
                f"{item.flops:.3e}",
                f"{plan.memory[rank].total / GB:.1f} GB",
                _ranges(item.kept_blocks) or "none",
            ]
        )
    title = f"Stages (parameters of a tp and ep rank; parameters and FLOPs {Label.measured} on the modules)"
    return f"{title}\n{_table([head, *rows])}"


def _memory(plan: Plan, kept: dict[ActivationCheckpoint, float]) -> str:
    worst = max(range(len(plan.memory)), key=lambda rank: plan.memory[rank].total)
    memory = plan.memory[worst]
    rows = [[kind, f"{size / GB:.2f} GB", LABELS[kind].value] for kind, size in memory.by_kind.items()]
    rows.append(["total", f"{memory.total / GB:.2f} GB", f"of {plan.machine.hardware.memory / GB:.0f} GB"])
    modes = ", ".join(f"{mode.value} {size / GB:.1f} GB" for mode, size in kept.items())
    host = f"\nin the host's memory, of each rank: {memory.host / GB:.2f} GB" if memory.host else ""
    return (
        f"Memory of the fullest rank (pipeline rank {worst})\n{_table(rows)}\n"
        f"activations by parallel.activation_checkpoint: {modes}{host}"
    )


def _traffic(plan: Plan) -> str:
    if not plan.traffic:
        return "Traffic: none, there is one rank"
    head = ["axis", "what", "sent by a rank a step", "over"]
    rows = [[item.axis, item.what, f"{item.bytes / GB:.2f} GB", item.link.value] for item in plan.traffic]
    return f"Traffic ({Label.modelled}: from shapes, as collectives send)\n{_table([head, *rows])}"


def _work(plan: Plan) -> str:
    share = plan.low_precision_flops / plan.flops
    rate = plan.flops / plan.time.total / plan.layout.devices / TFLOPS
    return (
        f"Model FLOPs of a step: {plan.flops:.3e}, {100 * share:.1f} % of them in 4-bit products ({Label.measured} on"
        f" the modules); {rate:,.0f} TFLOP/s a device"
    )


def _time(plan: Plan) -> str:
    total = plan.time.total
    rows = [
        [name.replace("_", " "), f"{seconds:.4f} s", f"{100 * seconds / total:.1f} %"]
        for name, seconds in plan.time.by_part.items()
        if seconds
    ]
    per_device = plan.tokens_per_second / plan.layout.devices
    price = plan.machine.hardware.figures["price"]
    return (
        f"Time of a step ({Label.modelled})\n{_table([*rows, ['total', f'{total:.4f} s', '']])}\n"
        f"{plan.tokens_per_second:,.0f} tokens/s, {per_device:,.0f} a device\n"
        f"{plan.total_tokens:,} tokens: {plan.days:,.1f} days, {plan.cost:,.0f} USD at {plan.machine.hardware.price}"
        f" USD a device and hour (price {price.label}); no evaluation, checkpoint or failure is counted"
    )


def _calibration(plan: Plan, comparisons: list[Comparison]) -> str:
    """Say how far off the model is, above all on the same hardware."""
    same = [item for item in comparisons if item.point.hardware == plan.machine.hardware.name]
    shown = same or comparisons
    where = plan.machine.hardware.name if same else "other hardware; there is no published run of this one"
    largest = max(abs(item.error) for item in comparisons)
    lines = [
        f"How wrong the time is: on {len(comparisons)} published runs the typical error is "
        f"{100 * typical_error(comparisons):.0f} %, the largest {100 * largest:.0f} %; on {where}:"
    ]
    rows = [
        [
            f"  {item.point.model}, {item.point.recipe}, {item.point.devices} {item.point.hardware}",
            f"published {item.point.tokens:,.0f}",
            f"modelled {item.modelled:,.0f}",
            f"{100 * item.error:+.0f} %",
        ]
        for item in shown
    ]
    return "\n".join([*lines, _table(rows)])


def _hardware(hardware: Hardware) -> str:
    rows = [
        [
            f"  {name}",
            "none" if item.value is None else f"{item.value:,.4g}",
            item.label.value,
            item.source + (f" ({item.note})" if item.note else ""),
        ]
        for name, item in hardware.figures.items()
    ]
    return f"Figures of {hardware.name}, a device\n{_table(rows)}"


def _table(rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _ranges(numbers: Iterable[int]) -> str:
    """``0-2, 5`` for 0, 1, 2, 5."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)
