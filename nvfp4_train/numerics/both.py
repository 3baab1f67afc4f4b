"""Quantizing one tensor in both directions at once: x for fprop and for wgrad, dy for dgrad and for wgrad.

The tensor is read from memory once for its two maxima and once for both results. Bitwise equal to two separate calls,
which is what happens where one pass is not enough.
"""

from dataclasses import dataclass

from torch import Tensor

from nvfp4_train.numerics.kernels import is_compiled, native
from nvfp4_train.numerics.quantize import Direction, QuantizedTensor, compute_amax, kernel_settings, quantize
from nvfp4_train.numerics.random import RandomStream
from nvfp4_train.numerics.spec import GlobalScale, OperandSpec, Rounding


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One of the two directions.

    Args:
        spec: The format.
        direction: Which dim is contracted.
        stream: Random bytes, if it rounds stochastically.
        sign_mask: Drawn signs of the Hadamard transform.
    """

    spec: OperandSpec
    direction: Direction
    stream: RandomStream | None = None
    sign_mask: int | None = None

    def settings(self) -> list[int]:
        """Return what the kernel is told."""
        stream = self.stream if self.spec.rounding is Rounding.stochastic else None
        return kernel_settings(self.spec, self.direction, stream=stream, sign_mask=self.sign_mask)


def compute_amax_both(x: Tensor, row: Cell, column: Cell) -> tuple[Tensor, Tensor]:
    """Return what `compute_amax` gives for each of the two cells.

    Args:
        x: bf16, fp16 or fp32 [M, N].
        row: Contracts N.
        column: Contracts M.
    """
    scales = {cell.spec.fp32_scale for cell in (row, column)}
    if scales == {GlobalScale.tensor} and _fits(x, row, column):
        return native.amax_both_op(x, row.settings(), column.settings())
    first, second = (
        compute_amax(x, cell.spec, direction=cell.direction, sign_mask=cell.sign_mask) for cell in (row, column)
    )
    return first, second


def quantize_both(
    x: Tensor, row: Cell, column: Cell, *, amax: tuple[Tensor, Tensor]
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Return what `quantize` gives for each of the two cells.

    Args:
        x: bf16, fp16 or fp32 [M, N].
        row: Contracts N.
        column: Contracts M.
        amax: Of each, as `compute_amax_both` returns them.

    Raises:
        ValueError: as `quantize`.
    """
    if _fits(x, row, column):
        parts = native.quantize_both_op(x, *amax, row.settings(), column.settings())
        shape = (x.shape[0], x.shape[1])
        return (
            QuantizedTensor(parts[0], parts[1], amax[0], row.spec, shape, x.dtype),
            QuantizedTensor(parts[2], parts[3], amax[1], column.spec, shape[::-1], x.dtype),
        )
    first, second = (
        quantize(x, cell.spec, direction=cell.direction, amax=own, stream=cell.stream, sign_mask=cell.sign_mask)
        for cell, own in zip((row, column), amax, strict=True)
    )
    return first, second


def _fits(x: Tensor, row: Cell, column: Cell) -> bool:
    has_streams = all(cell.stream is not None or cell.spec.rounding is Rounding.nearest_even for cell in (row, column))
    return has_streams and is_compiled(x) and native.fits_one_pass(x, row.settings(), column.settings())
