"""What was rounded, and where it lies in the operand that one process would hold."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nvfp4_train.numerics.random import RandomStream
from nvfp4_train.precision.operands import OPERAND_PLACES, OperandRounder

# Layer, operand and microbatch (-1 for weights, which all microbatches share).
OperandName = tuple[str, str, int]


@dataclass(frozen=True, kw_only=True)
class RoundedOperand:
    """A quantized operand, or the part of one that a rank holds.

    Args:
        values: [R, C], code times block scale.
        amax: fp32 [1] or [R].
        key: Of its random bytes; None where it draws none.
        rows: [R] int64, index of each row in the whole operand; tokens count from the start of their microbatch.
        columns: [C] int64, likewise.
    """

    values: Tensor
    amax: Tensor
    key: int | None
    rows: Tensor
    columns: Tensor


Operands = dict[OperandName, RoundedOperand]


@contextmanager
def recorded_operands(*, tokens_per_microbatch: int) -> Iterator[Operands]:
    """Collect every operand that is quantized in this context."""
    found: Operands = {}
    originals = OperandRounder.round, OperandRounder.store, OperandRounder.store_both

    def note(rounder: OperandRounder, name: str, operand: Any) -> None:
        if rounder.specs[name].is_quantized:
            microbatch = -1 if name.endswith(".w") else rounder.offsets["tokens"] // tokens_per_microbatch
            record = _record(rounder, name, operand, first_token=microbatch * tokens_per_microbatch)
            found[rounder.layer, name, microbatch] = record

    def rounded(rounder: OperandRounder, name: str, tensor: Tensor) -> Any:
        operand = originals[0](rounder, name, tensor)
        note(rounder, name, operand)
        return operand

    def stored(rounder: OperandRounder, name: str, tensor: Tensor) -> Any:
        operand = originals[1](rounder, name, tensor)
        note(rounder, name, operand.to_gemm_operand())
        return operand

    def stored_both(rounder: OperandRounder, row: str, column: str, tensor: Tensor) -> Any:
        operands = originals[2](rounder, row, column, tensor)
        for name, operand in zip((row, column), operands, strict=True):
            note(rounder, name, operand.to_gemm_operand())
        return operands

    patched = rounded, stored, stored_both
    OperandRounder.round, OperandRounder.store, OperandRounder.store_both = patched  # type: ignore[method-assign]
    try:
        yield found
    finally:
        OperandRounder.round, OperandRounder.store, OperandRounder.store_both = originals  # type: ignore[method-assign]


def _record(rounder: OperandRounder, name: str, operand: Any, *, first_token: int) -> RoundedOperand:
    place, stream = OPERAND_PLACES[name], rounder.stream_of(name)
    rows = _global(operand.values.shape[0], stream.row_offset, stream.row_segment, stream.row_stride)
    columns = _global(operand.values.shape[1], stream.column_offset, stream.column_segment, stream.column_stride)
    return RoundedOperand(
        values=operand.values.clone(),
        amax=operand.amax.clone(),
        key=_key(rounder.stream(name)),
        rows=rows - first_token if place.rows == "tokens" else rows,
        columns=columns - first_token if place.columns == "tokens" else columns,
    )


def _key(stream: RandomStream | None) -> int | None:
    return None if stream is None else stream.key


def _global(count: int, offset: int, segment: int, stride: int) -> Tensor:
    local = torch.arange(count)
    return offset + local if segment == 0 else offset + local // segment * stride + local % segment


def is_equal(part: RoundedOperand, whole: RoundedOperand) -> bool:
    """Say whether a part is what the whole has in its place, with the same amax, bit for bit."""
    return share_of_equal_values(part, whole) == 1.0 and torch.equal(part.amax, _rows_of(whole.amax, part.rows))


def share_of_equal_values(part: RoundedOperand, whole: RoundedOperand) -> float:
    """Return how much of a part is bit for bit what the whole has in its place, but for the amax.

    An operand with another random key, or outside the whole, has nothing in common with it.
    """
    inside = part.rows.max() < len(whole.values) and part.columns.max() < whole.values.shape[1]
    if part.key != whole.key or not inside:
        return 0.0
    values = whole.values[part.rows][:, part.columns]
    return float((part.values == values).double().mean())


def has_similar_amax(part: RoundedOperand, whole: RoundedOperand) -> bool:
    """Say whether both have the same amax up to the rounding of FP32 sums."""
    return torch.allclose(part.amax, _rows_of(whole.amax, part.rows), rtol=1e-5, atol=0.0)


def _rows_of(amax: Tensor, rows: Tensor) -> Tensor:
    return amax if len(amax) == 1 else amax[rows]
