"""What every Linear runs and why: the result of the precision pass, as a file and as a table."""

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from nvfp4_train.config.recipe import ComputeDtype, LinearRecipe
from nvfp4_train.model.peaks import Precision
from nvfp4_train.numerics.spec import FOUR_BIT_FORMATS, HIGH_PRECISION_FORMATS, Format
from nvfp4_train.precision.position import RoundingPosition

GEMMS = ("fprop", "dgrad", "wgrad")
_INDEX = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, kw_only=True)
class CoverageRow:
    """One Linear: name and shape, the recipe it runs, the rule that decided, its GEMMs with two 4-bit operands.

    `weight_gather` is what ranks send of its weight, and why if that is not what was asked for.

    The Linears of a group of experts are one row; each token uses `uses_per_token` of its `num_experts`.
    `gemm_precisions` says of each GEMM which of a device's speeds it runs at: that of the wider of its operands.
    """

    module: str
    in_features: int
    out_features: int
    recipe: str
    why: str
    low_precision_gemms: list[str]
    gemm_precisions: dict[str, Precision]
    num_experts: int = 1
    uses_per_token: int = 1
    weight_gather: str = "bf16"

    @property
    def flops_per_token(self) -> int:
        """Of one GEMM; fprop, dgrad and wgrad cost the same."""
        return 2 * self.in_features * self.out_features * self.uses_per_token


@dataclass(frozen=True, kw_only=True)
class PrecisionPlan:
    """Result of the precision pass.

    Args:
        position: Shared by all QuantizedLinears; the engine moves it.
        recipe: Name of the recipe.
        compute_dtype: What the kept Linears and all activations use.
        coverage: One row per Linear, in the order of the model.
        extensions: What the recipe takes from outside: key, path, arguments, file and hash of each.
        after_step: Called by the engine after each optimizer step with the model and `step`.
    """

    position: RoundingPosition
    recipe: str
    compute_dtype: ComputeDtype
    coverage: list[CoverageRow]
    extensions: list[dict[str, Any]] = field(default_factory=list)
    after_step: Callable[..., None] | None = None

    @property
    def flops_share_low_precision(self) -> float:
        """Share of the FLOPs of all Linears, forward and backward, in GEMMs whose operands both have 4 bits."""
        total = sum(row.flops_per_token * len(GEMMS) for row in self.coverage)
        return (
            sum(row.flops_per_token * len(row.low_precision_gemms) for row in self.coverage) / total if total else 0.0
        )

    @property
    def num_low_precision(self) -> int:
        """Linears with at least one GEMM in low precision."""
        return sum(bool(row.low_precision_gemms) for row in self.coverage)


def low_precision_gemms(recipe: LinearRecipe) -> list[str]:
    """Return the GEMMs of a recipe whose two operands both have 4-bit formats."""
    specs = recipe.operands
    return [
        gemm
        for gemm in GEMMS
        if all(spec.format in FOUR_BIT_FORMATS for name, spec in specs.items() if name.startswith(gemm))
    ]


def gemm_precisions(recipe: LinearRecipe) -> dict[str, Precision]:
    """Return of each GEMM of a recipe the precision of the wider of its two operands."""
    widest_first = list(Precision)
    return {
        gemm: min(
            (_precision(spec.format) for name, spec in recipe.operands.items() if name.startswith(gemm)),
            key=widest_first.index,
        )
        for gemm in GEMMS
    }


def _precision(element: Format) -> Precision:
    if element in FOUR_BIT_FORMATS:
        return Precision.fp4
    return Precision(element.value) if element in HIGH_PRECISION_FORMATS else Precision.fp8


def coverage_report(plan: PrecisionPlan) -> dict[str, object]:
    """Return every Linear with its recipe, and the totals, as values that JSON has."""
    return {
        "recipe": plan.recipe,
        "compute_dtype": plan.compute_dtype.value,
        "num_linears": len(plan.coverage),
        "num_low_precision": plan.num_low_precision,
        "flops_share_low_precision": plan.flops_share_low_precision,
        "extensions": plan.extensions,
        "linears": [asdict(row) for row in plan.coverage],
    }


def format_coverage(plan: PrecisionPlan) -> str:
    """Return the coverage report as a plain table; Linears that differ in the block index only share a line."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for row in plan.coverage:
        shape = f"{row.in_features} -> {row.out_features}"
        if row.num_experts > 1:
            shape = f"{row.uses_per_token} of {row.num_experts} x {shape}"
        lines.setdefault((_INDEX.sub("{}", row.module, count=1), shape, row.recipe, row.why), []).append(row.module)
    cells: list[tuple[str, ...]] = [("module", "shape", "recipe", "why")]
    cells += [(_merged_name(modules), *key[1:]) for key, modules in lines.items()]
    widths = [max(len(line[column]) for line in cells) for column in range(3)]
    table = [
        "  ".join(text.ljust(width) for text, width in zip(line, [*widths, 0], strict=True)).rstrip() for line in cells
    ]
    share = 100 * plan.flops_share_low_precision
    table.append(
        f"{plan.num_low_precision} of {len(plan.coverage)} Linears, {share:.1f} % of their FLOPs in low precision; "
        f"the others compute in {plan.compute_dtype.value}"
    )
    table += [
        f"{extension['key']} is {extension['path']} ({extension['file']}, sha256 {extension['sha256'][:12]})"
        for extension in plan.extensions
    ]
    return "\n".join(table)


def _merged_name(modules: list[str]) -> str:
    """`blocks.{0-2,5}.mixer.in_proj` for names that differ in their first index."""
    if len(modules) == 1:
        return modules[0]
    indices = [int(match[0]) for match in map(_INDEX.search, modules) if match]
    ranges: list[list[int]] = []
    for index in indices:
        if ranges and index == ranges[-1][1] + 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
    return _INDEX.sub(f"{{{text}}}", modules[0], count=1)
