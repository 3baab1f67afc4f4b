"""Rounding of scaled elements to codes."""

import torch
from torch import Tensor

from nvfp4_train.numerics.formats import E2M1, E2M1_SIGN_BIT, Element, encode_element, grid_step


def round_nearest_even(scaled: Tensor, element: Element = E2M1) -> Tensor:
    """Round fp32 `scaled` to codes (uint8, unpacked), ties to the even mantissa, saturating at the largest element.

    E2M1: the sign bit is set for values below zero only: -0.0 gives code 0, a tiny negative value gives code 8 (-0).
    NaN gives 0, because a block that holds a NaN has a NaN scale, which keeps the NaN visible. Formats of 8 bits keep
    the sign of -0.0, and have a code for NaN, which infinity gets too, because with a scale from older tensors nothing
    else would keep it visible.
    """
    if element is not E2M1:
        return encode_element(_infinite_as_nan(scaled), element)
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


def round_stochastic(scaled: Tensor, random_bytes: Tensor, element: Element = E2M1) -> Tensor:
    """Round fp32 `scaled` to one of the two neighbouring codes, up with a probability in steps of 1/256.

    The probability is the distance to the lower neighbour over their distance, so the mean is right to 1/256 of a
    step and a value on the grid never moves. The sign of the input is kept for zero results too. NaN and infinity as
    above.

    Args:
        scaled: fp32 of any shape; values beyond the largest element saturate.
        random_bytes: uint8 of the same shape, uniform.
        element: Format of the codes.

    Returns:
        Codes, uint8, unpacked.

    Source: the software rule for 8 random bits per element that NVIDIA's `cvt.rs.satfinite.e2m1x4` replaces.
    """
    scaled = scaled if element is E2M1 else _infinite_as_nan(scaled)
    size = scaled.abs().clamp(max=element.largest)
    # byte/256 * step is exact, so this sum is the only rounding
    moved = size + random_bytes.to(torch.float32) * (grid_step(size, element) / 256)
    step = grid_step(moved, element)
    floored = (torch.floor(moved / step) * step).clamp(max=element.largest)
    if element is not E2M1:
        return encode_element(floored.copysign(scaled), element)
    magnitude = torch.where(floored < 2, floored * 2, torch.where(floored < 4, floored + 2, floored / 2 + 4))
    codes = magnitude.nan_to_num(nan=0.0).to(torch.uint8) | (scaled.signbit().to(torch.uint8) * E2M1_SIGN_BIT)
    return torch.where(scaled.isnan(), 0, codes)


def _infinite_as_nan(scaled: Tensor) -> Tensor:
    return torch.where(scaled.isinf(), float("nan"), scaled)
