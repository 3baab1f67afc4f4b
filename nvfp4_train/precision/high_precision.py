"""Evaluation without the recipe's rounding, from the same weights."""

from collections.abc import Iterator
from contextlib import contextmanager

from nvfp4_train.precision.position import RoundingPosition


@contextmanager
def high_precision(position: RoundingPosition) -> Iterator[None]:
    """Run every QuantizedLinear that shares `position` in the compute dtype, with no quantization, inside this context.

    The compute dtype is the recipe's `compute_dtype`. For the low-precision recipes that is BF16, so a model
    evaluated in here is, bit for bit, the model of the `bf16` recipe with these weights. For the `fp32` recipe the
    compute dtype is FP32 and every Linear runs as it does outside: the two evaluations of a validation are then equal
    by definition.
    """
    before = position.high_precision
    position.high_precision = True
    try:
        yield
    finally:
        position.high_precision = before
