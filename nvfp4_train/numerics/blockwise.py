"""GEMMs that add up blocks of the contraction one by one: those with FP32 scales inside it, and the reference order."""

from collections.abc import Callable

import torch
from torch import Tensor

from nvfp4_train.numerics.quantize import GemmOperand
from nvfp4_train.numerics.scaling import decode_chunks
from nvfp4_train.numerics.spec import CHUNK, GlobalScale, OperandSpec

Multiply = Callable[[Tensor, Tensor], Tensor]


def has_chunks(spec: OperandSpec) -> bool:
    """Whether FP32 scales change along the contraction dim, so that no factor after the GEMM can apply them."""
    return spec.fp32_scale is GlobalScale.block_128


def reference_width(a: OperandSpec, b: OperandSpec) -> int:
    """Return the length of the blocks that the reference order adds up: the shorter block, or a chunk of 128."""
    if has_chunks(a) or has_chunks(b):
        return CHUNK
    return min((spec.block_size for spec in (a, b) if spec.block_size), default=CHUNK)


def sum_blocks(a: GemmOperand, b: GemmOperand, *, width: int, multiply: Multiply) -> Tensor:
    """Return the sum over blocks of the contraction, in ascending order in FP32, fp32 [R_a, R_b].

    The product of a block is multiplied by the product of both chunk factors, where there are any, and added: three
    roundings a block. The global factor of the operands is left out.

    Args:
        a: [R_a, K].
        b: [R_b, K].
        width: Length of a block; a divisor of 128.
        multiply: Returns the fp32 product of [R_a, width] and [R_b, width].
    """
    (rows, depth), columns = a.shape, b.shape[0]
    factors_a, factors_b = (chunk_factors(side.amax, side.spec) for side in (a, b))
    total = torch.zeros(rows, columns, dtype=torch.float32, device=a.device)
    for start in range(0, depth, width):
        elements = slice(start, start + width)
        product = multiply(a.values[:, elements], b.values[:, elements])
        factor = None
        if factors_a is not None:
            factor = factors_a[:, start // CHUNK].unsqueeze(1)
        if factors_b is not None:
            along = factors_b[:, start // CHUNK].unsqueeze(0)
            factor = along if factor is None else factor * along
        total += product if factor is None else factor * product
    return total


def exact_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a b^T with sums in float64, rounded to fp32 once.

    The float64 sums are exact for E2M1 and E4M3 elements, and off by 2^-53 of the largest term for E5M2, whose products
    spread over 62 binades.
    """
    return (a.to(torch.float64) @ b.to(torch.float64).t()).to(torch.float32)


def chunk_factors(amax: Tensor | None, spec: OperandSpec) -> Tensor | None:
    """Return what the products of every 128 elements are multiplied by, fp32 [R, K/128] rounded up, if anything."""
    if not has_chunks(spec):
        return None
    assert amax is not None  # a spec with chunks has an amax for each
    return decode_chunks(amax, spec)
