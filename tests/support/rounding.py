"""What quantizers were given and drew."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nvfp4_train.precision.operands import OperandRounder


@contextmanager
def recorded_rounding() -> Iterator[dict[tuple[str, str, int], tuple[str, object]]]:
    """Collect a digest and the random stream of every rounded operand, by layer, operand and first token."""
    found: dict[tuple[str, str, int], tuple[str, object]] = {}
    originals = OperandRounder.round, OperandRounder.store, OperandRounder.store_both

    def note(rounder: OperandRounder, name: str, tensors: tuple[Tensor, ...]) -> None:
        if rounder.specs[name].is_quantized:
            digest = hashlib.blake2b()
            for tensor in tensors:
                digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
            first_token = -1 if name.endswith(".w") else rounder.offsets["tokens"]
            found[rounder.layer, name, first_token] = (digest.hexdigest(), rounder.stream(name))

    def rounded(rounder: OperandRounder, name: str, tensor: Tensor) -> Any:
        operand = originals[0](rounder, name, tensor)
        note(rounder, name, (operand.values, operand.amax))
        return operand

    def stored(rounder: OperandRounder, name: str, tensor: Tensor) -> Any:
        operand = originals[1](rounder, name, tensor)
        note(rounder, name, operand.tensors)
        return operand

    def stored_both(rounder: OperandRounder, row: str, column: str, tensor: Tensor) -> Any:
        operands = originals[2](rounder, row, column, tensor)
        for name, operand in zip((row, column), operands, strict=True):
            note(rounder, name, operand.tensors)
        return operands

    patched = rounded, stored, stored_both
    OperandRounder.round, OperandRounder.store, OperandRounder.store_both = patched  # type: ignore[method-assign]
    try:
        yield found
    finally:
        OperandRounder.round, OperandRounder.store, OperandRounder.store_both = originals  # type: ignore[method-assign]
