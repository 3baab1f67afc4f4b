"""A weight's quantized operands, made once for all microbatches of a step."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from nvfp4_train.numerics.spec import OperandSpec
from nvfp4_train.precision.arriving_weight import ArrivingWeight
from nvfp4_train.precision.operands import OperandRounder, StoredOperand


@dataclass
class WeightCache:
    """Keeps `fprop.w` and `dgrad.w` of one layer until something they depend on changes.

    They depend on the parameter object, on its values, on the spec and on the random bytes. Whether the values
    changed is told by the caller's counter and by PyTorch's own: the latter sees every in-place update of an
    unsharded parameter, but stays 0 under FSDP2, where the parameter of a forward is refilled and not updated.

    Attributes:
        arriving: Where the weight arrives quantized, in place of a parameter with values; nothing is kept then.
    """

    arriving: ArrivingWeight | None = None
    _entries: dict[str, tuple[Tensor, tuple[object, ...], StoredOperand]] = field(default_factory=dict)

    def operand(self, name: str, weight: Tensor, *, rounder: OperandRounder, version: int) -> StoredOperand:
        """Return `fprop.w` or `dgrad.w` of `weight` [out_features, in_features].

        In high precision that is the parameter itself, cast when it is used, so that nothing is kept twice. What is
        quantized is the BF16 cast of the weight, in every engine: FSDP2 hands out BF16 weights, a plain model FP32
        masters.
        """
        specs = rounder.specs
        if name == "dgrad.w" and is_shared(specs):
            return self.operand("fprop.w", weight, rounder=rounder, version=version).transposed()
        if not specs[name].is_quantized:
            return rounder.store(name, weight if self.arriving is None else self.arriving.whole())
        if self.arriving is not None:
            operand = self.arriving.operand()
            if specs[name].has_amax:
                rounder.record(name, operand.tensors[-1])
            return operand
        state = (version, weight._version, specs[name], rounder.stream(name))
        entry = self._entries.get(name)
        if entry is None or entry[0] is not weight or entry[1] != state:
            entry = (weight, state, rounder.store(name, weight.to(torch.bfloat16)))
            self._entries[name] = entry
        return entry[2]

    def clear(self) -> None:
        """Forget everything, for a caller that replaces the values in a way that no counter sees."""
        self._entries.clear()


def is_shared(specs: dict[str, OperandSpec]) -> bool:
    """Whether one quantization serves fprop and dgrad: with tiles the codes of w^T are those of w, transposed.

    Source: "Pretraining Large Language Models with NVFP4", 2D scaling: both passes see the same quantized weight.
    """
    spec = specs["fprop.w"]
    return spec == specs["dgrad.w"] and spec.is_quantized and spec.is_direction_free
