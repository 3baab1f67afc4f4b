"""A weight that reaches its Linear quantized."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from nvfp4_train.precision.operands import StoredOperand


@dataclass(frozen=True)
class ArrivingWeight:
    """Where a Linear finds the codes of its weight, whose values are on no single rank.

    Args:
        operand: Returns `fprop.w`, valid until the weight is sharded again.
        whole: Returns the BF16 weight [out_features, in_features], for a forward that does not quantize it; the ranks
            that share the weight call it together.
    """

    operand: Callable[[], StoredOperand]
    whole: Callable[[], Tensor]
