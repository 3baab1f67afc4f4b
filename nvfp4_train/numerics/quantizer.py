"""Quantizers: the interface that the built-in formats and functions from outside share.

A quantizer rounds one matrix whose last dim is contracted. What comes before (the transposition, the Hadamard
transform, the maximum that ranks agree on, the place in the random stream) and after (the GEMM, what is kept for
backward) is done for it.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from nvfp4_train.numerics.extension import resolve
from nvfp4_train.numerics.quantize import Direction, QuantizedTensor, quantize, transformed_matrix
from nvfp4_train.numerics.random import RandomStream
from nvfp4_train.numerics.spec import Block, Format, HadamardSigns, OperandSpec, Rounding

VALUE_FORMAT = {torch.float32: Format.fp32, torch.bfloat16: Format.bf16}

# (x fp32 [R, C], spec, stream or None, *, amax fp32, **args) -> bf16 or fp32 values [R, C], or codes and scales
Quantizer = Callable[..., Tensor | QuantizedTensor]


def built_in(x: Tensor, spec: OperandSpec, stream: RandomStream | None, *, amax: Tensor) -> QuantizedTensor:
    """Round x as the spec's format says: `quantize` with the interface of a quantizer from outside.

    Args:
        x: bf16 or fp32 [R, C], transformed already if the spec says so; the last dim is contracted.
        spec: The format.
        stream: Random bytes, if the spec rounds stochastically.
        amax: fp32, as `compute_amax` returns it.

    Returns:
        Codes and scales.
    """
    plain = replace(spec, hadamard_size=0, hadamard_signs=HadamardSigns.none, quantizer=None, args=None)
    return quantize(x, plain, direction=Direction.row, amax=amax, stream=stream)


def round_outside(
    x: Tensor,
    spec: OperandSpec,
    *,
    direction: Direction,
    amax: Tensor,
    stream: RandomStream | None,
    sign_mask: int | None = None,
) -> Tensor | QuantizedTensor:
    """Round x [M, N] with the quantizer from outside that the spec names.

    Returns:
        bf16 or fp32 values [R, C] of the quantized matrix, or its codes and scales.

    Raises:
        ValueError: if what the quantizer returns is neither.
    """
    assert spec.quantizer is not None
    matrix = transformed_matrix(x, spec, direction, sign_mask)
    result = resolve(spec.quantizer)(matrix, spec, stream, amax=amax, **(spec.args or {}))
    _check_result(result, spec.quantizer, (matrix.shape[0], matrix.shape[1]))
    return result


def value_spec(values: Tensor) -> OperandSpec:
    """Return the spec of an operand that is given by its values, fp32 or bf16."""
    return OperandSpec(format=VALUE_FORMAT[values.dtype], block=Block.none, rounding=Rounding.nearest_even)


def _check_result(result: object, path: str, shape: tuple[int, int]) -> None:
    if isinstance(result, QuantizedTensor):
        found, fits = f"codes of {result.shape}", result.shape == shape
    elif isinstance(result, Tensor):
        found, fits = f"{result.dtype} {tuple(result.shape)}", result.shape == shape and result.dtype in VALUE_FORMAT
    else:
        found, fits = type(result).__name__, False
    if not fits:
        raise ValueError(f"{path}: expected bf16 or fp32 {shape}, or a QuantizedTensor of that shape, found {found}")
