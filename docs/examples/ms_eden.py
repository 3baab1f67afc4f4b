"""MS-EDEN, an unbiased NVFP4 rounding with less than half of the error of stochastic rounding.

Rotate groups of 128 by a random Hadamard transform, round the elements to nearest, then correct the length: with
S = <y, y> / <y, Q(y)> the estimate S * Q(y) is unbiased over the rotation (EDEN). S goes into the E4M3 block scales,
which are too coarse to hold it, so the scales, and only they, are rounded stochastically.

Source: "Quartet II: Accurate LLM Pre-Training in NVFP4 by Improved Unbiased Gradient Estimation" (ICML 2026).

The values are rotated back here, so that the quantizer works in any cell, on one operand of a GEMM alone.
"""

import torch
from torch import Tensor

from nvfp4_train.numerics.formats import decode_e4m3, encode_e4m3
from nvfp4_train.numerics.random import RandomStream, random_bytes
from nvfp4_train.numerics.spec import OperandSpec

GROUP = 128  # rotated together
BLOCK = 16  # elements of a scale
LARGEST = 6 * 16 / 17 / 0.93  # what a block maximum becomes: a little clipping has the lowest error
SCALE_MAX = 255.99  # leaves room in E4M3 for the correction
GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def ms_eden(x: Tensor, spec: OperandSpec, stream: RandomStream | None, *, amax: Tensor) -> Tensor:
    """Round x [R, C], C a multiple of 128, without bias.

    Args:
        x: fp32 [R, C].
        spec: Must round stochastically, so that there is a stream.
        stream: Random bytes of the signs and of the scales.
        amax: fp32 [1], the maximum before the rotation.

    Returns:
        fp32 [R, C].
    """
    if stream is None:
        raise ValueError(f"ms_eden draws random bits; set rounding: stochastic in its cell, found {spec.rounding}")
    matrix = hadamard(GROUP).to(x.device)
    # Another key than that of the scales, and no offsets: every shard of a tensor rotates alike.
    signs = 1.0 - 2.0 * (random_bytes(RandomStream(stream.key ^ 1), 1, GROUP, device=x.device) & 1).float()
    y = (x.unflatten(-1, (-1, GROUP)) * signs) @ matrix  # [R, groups, 128]
    # A rotated element is at most sqrt(128) times the largest one.
    tensor_scale = (amax * GROUP**0.5 / (SCALE_MAX * LARGEST)).clamp(min=1e-30)
    blocks = y.unflatten(-1, (-1, BLOCK))
    scale = decode_e4m3(encode_e4m3(blocks.abs().amax(-1, keepdim=True) / LARGEST / tensor_scale))
    unit = (scale * tensor_scale).clamp(min=1e-30)
    codes = nearest(blocks / unit)
    rounded = codes * unit
    overlap = (blocks * rounded).sum((-2, -1), keepdim=True)
    length = torch.where(overlap > 0, (blocks * blocks).sum((-2, -1), keepdim=True) / overlap, 1.0)
    noise = random_bytes(stream, x.shape[0], x.shape[1], device=x.device)[:, ::BLOCK].view(scale.shape)
    corrected = stochastic_e4m3(scale * length, noise.float() / 256)
    return ((codes * corrected * tensor_scale).flatten(-2) @ matrix.t() * signs).flatten(-2)


def hadamard(size: int) -> Tensor:
    """Return the orthonormal Hadamard matrix."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5


def nearest(scaled: Tensor) -> Tensor:
    """Round to the nearest E2M1 number."""
    grid = torch.tensor(GRID, device=scaled.device)
    index = torch.bucketize(scaled.abs(), (grid[1:] + grid[:-1]) / 2)
    return grid[index] * scaled.sign()


def stochastic_e4m3(value: Tensor, noise: Tensor) -> Tensor:
    """Round positive numbers to one of the two E4M3 neighbours, by chance in proportion to the distance."""
    near = encode_e4m3(value).to(torch.int32)
    below = torch.where(decode_e4m3(near.to(torch.uint8)) > value, near - 1, near).clamp(0, 125)
    low, high = decode_e4m3(below.to(torch.uint8)), decode_e4m3((below + 1).to(torch.uint8))
    return torch.where((value - low) / (high - low) > noise, high, low)
