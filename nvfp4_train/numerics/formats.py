"""The number formats of elements and scales, and how codes are packed.

Elements: E2M1 (4 bits), E4M3 and E5M2 (8 bits). Scales: E4M3 and E8M0, a power of two (8 bits). Everything is integer
and fp32 arithmetic without float8 types, which compilers for GPUs before SM89 do not have.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4_train.numerics.spec import Format

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
E2M1_SIGN_BIT = 8
E4M3_MAX = 448.0
E4M3_NAN = 0x7F  # a NaN of either sign decodes to NaN; this is the byte we write
E8M0_NAN = 0xFF
BLOCK_LENGTH = 16

_FP32_SIZE_BITS = 0x7FFFFFFF
_FP32_EXPONENT_BITS = 0x7F800000
_FP32_MANTISSA_BITS = 23
_FP32_BIAS = 127


@dataclass(frozen=True)
class Element:
    """A small floating-point format: sign, exponent, mantissa, and the largest number that codes are used for.

    Args:
        largest: Largest magnitude; what lies beyond saturates to it. E4M3 has no infinity, E5M2's is not used.
        largest_exponent: Exponent of `largest`.
        smallest_exponent: Exponent of the smallest normal number; below it the spacing stays the same.
        mantissa_bits: Bits of the mantissa.
        bits: Bits of a code.
    """

    largest: float
    largest_exponent: int
    smallest_exponent: int
    mantissa_bits: int
    bits: int

    @property
    def rebias(self) -> int:
        """Exponent code of fp32 minus that of this format, for the same number."""
        return _FP32_BIAS + self.smallest_exponent - 1

    @property
    def dropped_bits(self) -> int:
        """Mantissa bits of fp32 that this format lacks."""
        return _FP32_MANTISSA_BITS - self.mantissa_bits


E2M1 = Element(largest=6.0, largest_exponent=2, smallest_exponent=0, mantissa_bits=1, bits=4)
E4M3 = Element(largest=448.0, largest_exponent=8, smallest_exponent=-6, mantissa_bits=3, bits=8)
E5M2 = Element(largest=57344.0, largest_exponent=15, smallest_exponent=-14, mantissa_bits=2, bits=8)
ELEMENT = {
    Format.nvfp4: E2M1,
    Format.mxfp4: E2M1,
    Format.mxfp8_e4m3: E4M3,
    Format.mxfp8_e5m2: E5M2,
    Format.fp8_e4m3: E4M3,
    Format.fp8_e5m2: E5M2,
}


def grid_step(size: Tensor, element: Element) -> Tensor:
    """Return the distance of the element's neighbours around magnitudes `size` (fp32, not negative, not NaN)."""
    power = (size.view(torch.int32) & _FP32_EXPONENT_BITS).view(torch.float32)
    return power.clamp(min=2.0**element.smallest_exponent) * 2.0**-element.mantissa_bits


def encode_element(values: Tensor, element: Element) -> Tensor:
    """Round fp32 `values` to 8-bit codes (uint8), nearest even, saturating; NaN becomes 0x7F.

    Normal numbers are rounded by integer arithmetic on their bits: a carry out of the mantissa moves the exponent, as
    it should. Below them, adding a power of two whose fp32 spacing is that of the subnormal numbers rounds, and the
    sum's last bits are the code.
    """
    size = values.abs().clamp(max=element.largest)
    bits = size.view(torch.int32)
    dropped = element.dropped_bits
    half = (1 << (dropped - 1)) - 1
    normal = ((bits + half + ((bits >> dropped) & 1)) >> dropped) - (element.rebias << element.mantissa_bits)
    magic = 2.0 ** (_FP32_MANTISSA_BITS + element.smallest_exponent - element.mantissa_bits)
    subnormal = (size + magic).view(torch.int32) & 0xFF
    code = torch.where(size < 2.0**element.smallest_exponent, subnormal, normal)
    signed = code | torch.where(values.signbit(), 0x80, 0)
    return torch.where(values.isnan(), E4M3_NAN, signed).to(torch.uint8)


def decode_element(codes: Tensor, element: Element) -> Tensor:
    """Return the fp32 values of 8-bit `codes` (uint8); exact. Codes kept for NaN and infinity decode to NaN."""
    code = codes.to(torch.int32)
    size = code & 0x7F
    normal = ((size + (element.rebias << element.mantissa_bits)) << element.dropped_bits).view(torch.float32)
    subnormal = size.to(torch.float32) * 2.0 ** (element.smallest_exponent - element.mantissa_bits)
    value = torch.where(size < 1 << element.mantissa_bits, subnormal, normal)
    value = torch.where(value > element.largest, float("nan"), value)
    return torch.where(code > 0x7F, -value, value)


def e2m1_values(*, device: torch.device | str = "cpu") -> Tensor:
    """Return the 16 values that the E2M1 codes 0..15 stand for, fp32 [16]; code 8 is -0.0."""
    positive = torch.tensor(E2M1_MAGNITUDES, dtype=torch.float32, device=device)
    return torch.cat([positive, -positive])


def decode_e2m1(codes: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values of unpacked E2M1 `codes` (uint8, 0..15); exact in every floating dtype."""
    return e2m1_values(device=codes.device).to(dtype)[codes.long()]


def decode_codes(codes: Tensor, element: Element) -> Tensor:
    """Return the fp32 values of unpacked codes of any element format; exact."""
    return decode_e2m1(codes) if element is E2M1 else decode_element(codes, element)


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
    return encode_element(values, E4M3)


def decode_e4m3(encoded: Tensor) -> Tensor:
    """Return the fp32 values of E4M3 bytes (uint8); exact, bytes 0x7F and 0xFF give NaN."""
    return decode_element(encoded, E4M3)


def encode_e8m0(largest: Tensor, element: Element, *, round_up: bool) -> Tensor:
    """Return the power-of-two scales, as exponent bytes (uint8, bias 127), for block maxima.

    Rounding up gives the smallest power of two that keeps the maximum at or below the largest element, so nothing
    saturates; it is found by comparing mantissas, which is exact where `ceil(log2(...))` is not. Otherwise it is the
    power of two of the maximum over that of the largest element, the rule of the OCP Microscaling specification, and
    up to a quarter (E2M1) or an eighth (E4M3, E5M2) of a binade saturates. A maximum that is infinite or NaN gives
    the NaN byte, since the format has no infinity; one too small for the smallest scale, 2^-127, gets that.

    Args:
        largest: fp32, not negative.
        element: Format of the elements.
        round_up: Which rule.
    """
    bits = largest.view(torch.int32) & _FP32_SIZE_BITS  # a NaN may carry a sign
    mantissa = _fp32_mantissa(element.largest)
    carry = (1 << _FP32_MANTISSA_BITS) - 1 - mantissa if round_up else 0
    exponent = ((bits + carry) >> _FP32_MANTISSA_BITS) - element.largest_exponent
    return torch.where(bits >= _FP32_EXPONENT_BITS, E8M0_NAN, exponent.clamp(min=0)).to(torch.uint8)


def decode_e8m0(encoded: Tensor) -> Tensor:
    """Return the fp32 values of E8M0 bytes (uint8), 2^(byte - 127); exact, byte 0 is subnormal and 0xFF is NaN."""
    exponent = encoded.to(torch.int32)
    normal = exponent << _FP32_MANTISSA_BITS
    bits = torch.where(exponent == 0, 1 << (_FP32_MANTISSA_BITS - 1), normal)
    return torch.where(exponent == E8M0_NAN, float("nan"), bits.view(torch.float32))


def round_to_e4m3(values: Tensor) -> Tensor:
    """Round non-negative fp32 `values` to the E4M3 grid; the result stays fp32."""
    return decode_e4m3(encode_e4m3(values))


def _fp32_mantissa(value: float) -> int:
    """Mantissa bits of an fp32 number, without its leading one."""
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32)) & ((1 << _FP32_MANTISSA_BITS) - 1)
