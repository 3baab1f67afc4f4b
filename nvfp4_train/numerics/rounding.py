"""Rounding of scaled elements to E2M1 codes."""

import torch
from torch import Tensor

from nvfp4_train.numerics.formats import E2M1_MAX, E2M1_SIGN_BIT


def round_nearest_even(scaled: Tensor) -> Tensor:
    """Round fp32 `scaled` to E2M1 codes (uint8, unpacked), ties to the even mantissa, saturating at 6.

    The sign bit is set for values below zero only: -0.0 gives code 0, a tiny negative value gives code 8 (-0). NaN
    gives 0, because a block that holds a NaN has a NaN scale, which keeps the NaN visible.
    """
    size = scaled.abs()
    magnitude = (
        (size > 0.25).to(torch.uint8)
        + (size >= 0.75)
        + (size > 1.25)
        + (size >= 1.75)
        + (size > 2.5)
        + (size >= 3.5)
        + (size > 5.0)
    )
    return magnitude | ((scaled < 0).to(torch.uint8) * E2M1_SIGN_BIT)


def round_stochastic(scaled: Tensor, random_bytes: Tensor) -> Tensor:
    """Round fp32 `scaled` to one of the two neighbouring E2M1 codes, up with a probability in steps of 1/256.

    The probability is the distance to the lower neighbour over their distance, so the mean is right to 1/256 of a
    step and a value on the grid never moves. The sign of the input is kept for zero results too. NaN gives 0, as above.

    Args:
        scaled: fp32 of any shape; values beyond +-6 saturate.
        random_bytes: uint8 of the same shape, uniform.

    Returns:
        Codes, uint8, unpacked.

    Source: the software rule for 8 random bits per element that NVIDIA's `cvt.rs.satfinite.e2m1x4` replaces.
    """
    size = scaled.abs().clamp(max=E2M1_MAX)
    # byte/256 * step is exact, so this sum is the only rounding
    moved = size + random_bytes.to(torch.float32) * (_grid_step(size) / 256)
    step = _grid_step(moved)
    floored = (torch.floor(moved / step) * step).clamp(max=E2M1_MAX)
    magnitude = torch.where(floored < 2, floored * 2, torch.where(floored < 4, floored + 2, floored / 2 + 4))
    codes = magnitude.nan_to_num(nan=0.0).to(torch.uint8) | (scaled.signbit().to(torch.uint8) * E2M1_SIGN_BIT)
    return torch.where(scaled.isnan(), 0, codes)


def _grid_step(size: Tensor) -> Tensor:
    """Distance of the E2M1 neighbours around `size`: 0.5 below 2, 1 below 4, else 2."""
    one = torch.ones_like(size)
    return torch.where(size < 2, one * 0.5, torch.where(size < 4, one, one * 2))
