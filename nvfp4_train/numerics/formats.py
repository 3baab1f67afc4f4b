"""The two number formats of NVFP4: E2M1 elements (4 bits) and E4M3 block scales (8 bits), and how codes are packed."""

import torch
from torch import Tensor

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
E2M1_SIGN_BIT = 8
E4M3_MAX = 448.0
E4M3_NAN = 0x7F  # a NaN of either sign decodes to NaN; this is the byte we write
BLOCK_LENGTH = 16


def e2m1_values(*, device: torch.device | str = "cpu") -> Tensor:
    """Return the 16 values that the E2M1 codes 0..15 stand for, fp32 [16]; code 8 is -0.0."""
    positive = torch.tensor(E2M1_MAGNITUDES, dtype=torch.float32, device=device)
    return torch.cat([positive, -positive])


def decode_e2m1(codes: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values of unpacked E2M1 `codes` (uint8, 0..15); exact in every floating dtype."""
    return e2m1_values(device=codes.device).to(dtype)[codes.long()]


def pack_codes(codes: Tensor) -> Tensor:
    """Pack uint8 codes [..., C] into [..., C/2]: the even column goes to the low nibble.

    Raises:
        ValueError: for an odd number of columns.
    """
    if codes.shape[-1] % 2:
        raise ValueError(f"codes of shape {tuple(codes.shape)}: two codes share a byte, so the last dim must be even")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_codes(packed: Tensor) -> Tensor:
    """Undo `pack_codes`: uint8 [..., C/2] to [..., C]."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


def encode_e4m3(values: Tensor) -> Tensor:
    """Round fp32 `values` to E4M3 bytes (uint8), nearest even, saturating at 448; NaN becomes 0x7F."""
    saturated = values.clamp(-E4M3_MAX, E4M3_MAX)
    encoded = saturated.to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(values.isnan(), E4M3_NAN, encoded)


def decode_e4m3(encoded: Tensor) -> Tensor:
    """Return the fp32 values of E4M3 bytes (uint8); exact, bytes 0x7F and 0xFF give NaN."""
    return encoded.view(torch.float8_e4m3fn).to(torch.float32)


def round_to_e4m3(values: Tensor) -> Tensor:
    """Round non-negative fp32 `values` to the E4M3 grid without a float8 cast; the result stays fp32.

    Equal to `decode_e4m3(encode_e4m3(values))`. For compilers and devices without float8 types: normal numbers are
    rounded by integer arithmetic on their bits, subnormal ones by adding 2^14, whose fp32 spacing is E4M3's 2^-9.
    """
    saturated = values.clamp(max=E4M3_MAX)
    bits = saturated.view(torch.int32)
    to_nearest_even = bits + 0x7FFFF + ((bits >> 20) & 1)
    normal = (to_nearest_even & ~0xFFFFF).view(torch.float32)
    subnormal = (saturated + 16384.0) - 16384.0
    rounded = torch.where(saturated < 2.0**-6, subnormal, normal)
    return torch.where(values.isnan(), values, rounded)
