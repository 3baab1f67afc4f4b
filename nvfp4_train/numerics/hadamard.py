"""The random Hadamard transform that spreads outliers over groups of elements before quantization.

out = group * signs @ H / sqrt(size), with H in Sylvester order. In the published recipe "random" is history: groups of
16, and signs that are a constant, the same for every tensor, layer, step and rank. Whatever the signs, the two operands
of a GEMM share them, so that their transforms cancel.
"""

import torch
from torch import Tensor

from nvfp4_train.numerics.kernels import is_compiled, native
from nvfp4_train.numerics.random import stream_key
from nvfp4_train.numerics.spec import HadamardSigns, OperandSpec

FIXED_SIGN_MASK = 0xD7E8_D7E8_D7E8_D7E8_D7E8_D7E8_D7E8_D7E8  # the published 16 signs; bit i set: element i is negated
_FIXED_SIGNS = (HadamardSigns.none, HadamardSigns.fixed)
SQRT_HALF = 0.5**0.5


def fixed_sign_mask(signs: HadamardSigns) -> int:
    """Return the signs that need no drawing, one bit an element of a group of up to 128.

    Raises:
        ValueError: for signs that are drawn, see `drawn_sign_mask`.
    """
    if signs not in _FIXED_SIGNS:
        raise ValueError(f"hadamard_signs: {signs} are drawn, not fixed")
    return FIXED_SIGN_MASK if signs is HadamardSigns.fixed else 0


def drawn_sign_mask(signs: HadamardSigns, *, seed: int, layer: str, step: int, row: int) -> int:
    """Return the signs of one layer, 128 bits, from the portable random stream: both operands of its wgrad share them.

    Args:
        signs: `per_layer` or `per_call`.
        seed: Seed of the run.
        layer: Name of the Linear in the whole model.
        step: Optimizer step; counts for `per_call` only.
        row: Global row of the microbatch's first token; counts for `per_call` only.

    Raises:
        ValueError: for signs that are not drawn.
    """
    match signs:
        case HadamardSigns.per_layer:
            call = "layer"
        case HadamardSigns.per_call:
            call = f"row {row}"
        case _:
            raise ValueError(f"hadamard_signs: {signs} are not drawn")
    step = 0 if signs is HadamardSigns.per_layer else step
    low, high = (
        stream_key(seed=seed, layer=layer, operand=f"hadamard signs {call} {half}", step=step) for half in range(2)
    )
    return low | high << 64


def hadamard_matrix(signs: HadamardSigns) -> Tensor:
    """Return the transform of size 16 as a matrix R, bf16 [16, 16]: a group v becomes v @ R. Entries are +-0.25."""
    mask = fixed_sign_mask(signs)
    rows = [[0.25 * (-1) ** ((i & j).bit_count() + (mask >> i & 1)) for j in range(16)] for i in range(16)]
    return torch.tensor(rows, dtype=torch.bfloat16)


def check_transform_length(length: int, size: int) -> None:
    """Raise ValueError if groups of `size` do not fill a dim."""
    if length % size:
        raise ValueError(f"the Hadamard transform needs a multiple of {size} elements, found {length}")


def transform_mask(spec: OperandSpec, drawn: int | None) -> int:
    """Return the signs of an operand's transform: the drawn ones where `spec` wants them, else its fixed ones.

    Raises:
        ValueError: for drawn signs that are missing, or not wanted.
    """
    if spec.hadamard_signs in _FIXED_SIGNS:
        if drawn is not None:
            raise ValueError(f"hadamard_signs: {spec.hadamard_signs} are not drawn, found sign_mask {drawn:#x}")
        return fixed_sign_mask(spec.hadamard_signs)
    if drawn is None:
        raise ValueError(f"hadamard_signs: {spec.hadamard_signs} are drawn; pass sign_mask, from drawn_sign_mask")
    return drawn


def hadamard_transform(x: Tensor, *, size: int, sign_mask: int) -> Tensor:
    """Transform groups of `size` along the last dim.

    The input is rounded to BF16 first (nothing happens to BF16 input), the sums are FP32 and rounded to BF16 once.
    The order of the sums is fixed, butterfly stages with distances 1, 2, 4, ..., so that every implementation gives
    the same bits. Of the factor 1/sqrt(size), the power of two is applied before the sums, which is exact and keeps
    large values from overflowing, and for sizes 2, 8, 32 and 128 what is left, sqrt(1/2), after them.

    Args:
        x: [..., C], C a multiple of the size.
        size: Power of two from 2 to 128.
        sign_mask: Bit i set: element i of each group is negated first.

    Returns:
        bf16 [..., C], contiguous.

    Raises:
        ValueError: if groups do not fill C.
    """
    check_transform_length(x.shape[-1], size)
    if is_compiled(x):
        return native.hadamard_transform(x, size=size, sign_mask=sign_mask)
    num_stages = size.bit_length() - 1
    scale = 2.0 ** -(num_stages // 2)
    factors = torch.tensor([-scale if sign_mask >> i & 1 else scale for i in range(size)], device=x.device)
    groups = x.to(torch.bfloat16).to(torch.float32).reshape(-1, size) * factors
    for stage in range(num_stages):
        pairs = groups.view(-1, size >> (stage + 1), 2, 1 << stage)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        groups = torch.stack([first + second, first - second], dim=2)
    groups = groups.reshape(x.shape)
    if num_stages % 2:
        groups = groups * torch.tensor(SQRT_HALF, dtype=torch.float32, device=x.device)
    return groups.to(torch.bfloat16)
