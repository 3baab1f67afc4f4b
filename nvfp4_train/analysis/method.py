"""Checks of a quantizer from outside: what a user wants to know before a run is spent on it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from nvfp4_train.config.recipe import DgradRow, FpropRow, LinearRecipe, WgradRow
from nvfp4_train.numerics.quantize import Direction, QuantizedTensor, compute_amax, dequantize
from nvfp4_train.numerics.quantizer import built_in, round_outside
from nvfp4_train.numerics.random import RandomStream
from nvfp4_train.numerics.spec import Block, Format, GemmMode, GlobalScale, OperandSpec, Rounding
from nvfp4_train.precision.linear import LinearPrecision, QuantizedLinear
from nvfp4_train.precision.position import RoundingPosition

ROWS, COLUMNS = 256, 512
SEED = 1234


@dataclass(frozen=True, kw_only=True)
class Fidelity:
    """How far a rounding is from the truth, on normal numbers.

    Args:
        bias: Least-squares slope of the rounded values on the values, less 1, mean over the draws: 0 keeps lengths,
            -0.01 shrinks by 1 %.
        bias_error: Its standard error over the draws; 0 for a rounding without randomness.
        mse: Mean squared error of one draw, in units of the values' variance.
        seconds: Median time of one call.
    """

    bias: float
    bias_error: float
    mse: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class MethodReport:
    """What `check_method` finds.

    Args:
        path: The quantizer's import path.
        method: Its fidelity, with the rounding that was asked for.
        nearest: That of the built-in NVFP4, nearest even.
        stochastic: That of the built-in NVFP4, stochastic.
        row_shards_equal: Whether two halves of the rows, each with its offset and the whole's amax, give the bits of
            the whole.
        column_shards_equal: The same for halves of the columns.
        repeats: Whether a second call gives the same bits.
        gradient_cosines: Cosine of y, dx and dw of a Linear that uses it in all cells with those in FP32.
    """

    path: str
    method: Fidelity
    nearest: Fidelity
    stochastic: Fidelity
    row_shards_equal: bool
    column_shards_equal: bool
    repeats: bool
    gradient_cosines: dict[str, float]


def check_method(path: str, *, rounding: Rounding, args: dict[str, Any], draws: int) -> MethodReport:
    """Measure a quantizer from outside against the built-in NVFP4.

    Args:
        path: Import path `package.module:function`.
        rounding: What its cell says: stochastic gives it a random stream.
        args: Its further keyword arguments.
        draws: Streams to average over.

    Raises:
        ValueError: if there is no such function, or it returns something else than a quantizer does.
    """
    spec = replace(_spec(rounding), quantizer=path, args=args or None)
    x = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(SEED)).to(torch.bfloat16)
    whole = _outside(x, spec, _stream())
    return MethodReport(
        path=path,
        method=_fidelity(x, draws, lambda stream: _outside(x, spec, stream)),
        nearest=_fidelity(x, 1, lambda stream: _inside(x, Rounding.nearest_even, None)),
        stochastic=_fidelity(x, draws, lambda stream: _inside(x, Rounding.stochastic, stream)),
        row_shards_equal=_shards_equal(x, spec, whole, dim=0),
        column_shards_equal=_shards_equal(x, spec, whole, dim=1),
        repeats=torch.equal(whole, _outside(x, spec, _stream())),
        gradient_cosines=_gradient_cosines(spec),
    )


def format_method(report: MethodReport) -> str:
    """Return the report as text."""
    lines = [f"{report.path}\n", f"{'':28}{'bias':>20}{'mse':>12}{'ms':>9}"]
    for name, found in (
        ("this method", report.method),
        ("NVFP4, nearest even", report.nearest),
        ("NVFP4, stochastic", report.stochastic),
    ):
        bias = f"{found.bias:+.5f} ± {found.bias_error:.5f}"
        lines.append(f"{name:28}{bias:>20}{found.mse:12.5f}{1000 * found.seconds:9.2f}")
    lines += [
        "",
        f"{'mse / nearest even':28}{report.method.mse / report.nearest.mse:20.3f}",
        f"{'mse / stochastic':28}{report.method.mse / report.stochastic.mse:20.3f}",
        f"{'same bits when called again':28}{_word(report.repeats):>20}",
        f"{'same bits in row shards':28}{_word(report.row_shards_equal):>20}",
        f"{'same bits in column shards':28}{_word(report.column_shards_equal):>20}",
    ]
    lines += [f"{f'cosine of {name} with FP32':28}{value:20.5f}" for name, value in report.gradient_cosines.items()]
    return "\n".join(lines)


def _word(*values: bool) -> str:
    return "yes" if all(values) else "no"


def _spec(rounding: Rounding) -> OperandSpec:
    return OperandSpec(format=Format.nvfp4, block=Block.row_1x16, rounding=rounding, global_scale=GlobalScale.tensor)


def _stream(key: int = SEED, *, row: int = 0, column: int = 0) -> RandomStream:
    return RandomStream(key=key, row_offset=row, column_offset=column)


def _outside(x: Tensor, spec: OperandSpec, stream: RandomStream, amax: Tensor | None = None) -> Tensor:
    amax = compute_amax(x, spec, direction=Direction.row) if amax is None else amax
    drawn = stream if spec.rounding is Rounding.stochastic else None
    return _values(round_outside(x, spec, direction=Direction.row, amax=amax, stream=drawn))


def _inside(x: Tensor, rounding: Rounding, stream: RandomStream | None) -> Tensor:
    spec = _spec(rounding)
    return _values(built_in(x, spec, stream, amax=compute_amax(x, spec, direction=Direction.row)))


def _values(result: Tensor | QuantizedTensor) -> Tensor:
    return dequantize(result) if isinstance(result, QuantizedTensor) else result.float()


def _fidelity(x: Tensor, draws: int, rounds: Callable[[RandomStream], Tensor]) -> Fidelity:
    exact = x.double()
    energy = exact.square().sum()
    slopes, errors, seconds = [], [], []
    for draw in range(draws):
        start = time.perf_counter()
        rounded = rounds(_stream(SEED + draw)).double()
        seconds.append(time.perf_counter() - start)
        slopes.append(float((rounded * exact).sum() / energy) - 1.0)
        errors.append(float((rounded - exact).square().sum() / energy))
    slope = torch.tensor(slopes, dtype=torch.float64)
    spread = float(slope.std()) / draws**0.5 if draws > 1 else 0.0
    return Fidelity(bias=float(slope.mean()), bias_error=spread, mse=errors[0], seconds=median(seconds))


def _shards_equal(x: Tensor, spec: OperandSpec, whole: Tensor, *, dim: int) -> bool:
    amax = compute_amax(x, spec, direction=Direction.row)
    half = x.shape[dim] // 2
    parts = []
    for start in (0, half):
        shard = x.narrow(dim, start, half).contiguous()
        stream = _stream(row=start) if dim == 0 else _stream(column=start)
        parts.append(_outside(shard, spec, stream, amax))
    return torch.equal(torch.cat(parts, dim=dim), whole)


def _gradient_cosines(spec: OperandSpec) -> dict[str, float]:
    """A Linear with the method in all six cells, against FP32: a wrong gradient shows as a cosine far from 1."""
    generator = torch.Generator().manual_seed(SEED)
    x, dy = (torch.randn(ROWS, 256, generator=generator).to(torch.bfloat16) for _ in range(2))
    results = []
    for cell in (spec, OperandSpec(format=Format.fp32, block=Block.none, rounding=Rounding.nearest_even)):
        table = LinearRecipe(
            fprop=FpropRow(x=cell, w=cell), dgrad=DgradRow(dy=cell, w=cell), wgrad=WgradRow(x=cell, dy=cell)
        )
        results.append(_run(table, x, dy))
    pairs = zip(("y", "dx", "dw"), *results, strict=True)
    return {name: float(torch.cosine_similarity(a, b, dim=0)) for name, a, b in pairs}


def _run(table: LinearRecipe, x: Tensor, dy: Tensor) -> list[Tensor]:
    precision = LinearPrecision(
        layer="method", recipe_name="method", recipe=table, high_precision=table, gemm=GemmMode.auto
    )
    linear = QuantizedLinear(256, 256, bias=False, precision=precision, position=RoundingPosition(seed=SEED))
    with torch.no_grad():
        linear.weight.copy_(torch.randn(256, 256, generator=torch.Generator().manual_seed(SEED + 1)) / 16)
    leaf = x.clone().requires_grad_()
    y = linear(leaf)
    y.backward(dy)
    assert leaf.grad is not None
    assert linear.weight.grad is not None
    return [value.detach().double().flatten() for value in (y, leaf.grad, linear.weight.grad)]
