"""The random Hadamard transform that spreads outliers over groups of 16 before quantization.

out = group * signs @ H16 / 4, with H16 in Sylvester order. "Random" is history: the signs are a published constant,
the same for every tensor, layer, step and rank, so the transforms of a GEMM's two operands cancel.
"""

import torch
from torch import Tensor

from nvfp4_train.numerics.kernels import is_compiled, native
from nvfp4_train.numerics.spec import HADAMARD_SIGN_MASK, HadamardSigns

HADAMARD_SIZE = 16


def hadamard_matrix(signs: HadamardSigns) -> Tensor:
    """Return the transform as a matrix R, bf16 [16, 16]: a group v becomes v @ R. Entries are +-0.25."""
    rows = [
        [0.25 * (-1) ** ((i & j).bit_count() + (HADAMARD_SIGN_MASK[signs] >> i & 1)) for j in range(HADAMARD_SIZE)]
        for i in range(HADAMARD_SIZE)
    ]
    return torch.tensor(rows, dtype=torch.bfloat16)


def check_transform_length(length: int) -> None:
    """Raise ValueError if groups of 16 do not fill a dim."""
    if length % HADAMARD_SIZE:
        raise ValueError(f"the Hadamard transform needs a multiple of {HADAMARD_SIZE} elements, found {length}")


def hadamard_transform(x: Tensor, signs: HadamardSigns) -> Tensor:
    """Transform groups of 16 along the last dim.

    The input is rounded to BF16 first (nothing happens to BF16 input), the sums are FP32 and rounded to BF16 once.
    The order of the sums is fixed, four butterfly stages with distances 1, 2, 4, 8, so that every implementation
    gives the same bits. The factor 1/4 is applied before the sums, which is exact and keeps large values from
    overflowing.

    Args:
        x: [..., C], C a multiple of 16.
        signs: Which signs the elements get first.

    Returns:
        bf16 [..., C], contiguous.

    Raises:
        ValueError: if C is not a multiple of 16.
    """
    check_transform_length(x.shape[-1])
    if is_compiled(x):
        return native.hadamard_transform(x, signs)
    mask = HADAMARD_SIGN_MASK[signs]
    factors = torch.tensor([-0.25 if mask >> i & 1 else 0.25 for i in range(HADAMARD_SIZE)], device=x.device)
    groups = x.to(torch.bfloat16).to(torch.float32).reshape(-1, HADAMARD_SIZE) * factors
    for distance in (1, 2, 4, 8):
        pairs = groups.view(-1, HADAMARD_SIZE // (2 * distance), 2, distance)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        groups = torch.stack([first + second, first - second], dim=2)
    return groups.reshape(x.shape).to(torch.bfloat16)
