"""Rotary position embedding."""

import torch
from torch import Tensor


def rotate(x: Tensor, positions: Tensor, *, theta: float) -> Tensor:
    """Rotate channel pairs (i, i + P/2) of each head by an angle proportional to the token's position.

    Scores of rotated queries and keys then depend on the distance of the tokens only. Computed in FP32.

    Args:
        x: [B, S, H, P], P even.
        positions: [B, S] int; they restart in each document.
        theta: Base of the geometric series of wavelengths.

    Returns:
        [B, S, H, P] in the dtype of ``x``.

    Source: RoFormer, https://arxiv.org/abs/2104.09864, with the half-split pairing of GPT-NeoX and Llama.
    """
    half = x.shape[-1] // 2
    precise = torch.promote_types(x.dtype, torch.float32)
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=precise) / half)
    angle = (positions[..., None] * frequency)[:, :, None]  # [B, S, 1, P/2]
    cosine, sine = angle.cos(), angle.sin()
    first, second = x.to(precise).chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(x.dtype)
