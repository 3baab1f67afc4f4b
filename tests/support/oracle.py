"""NVFP4 a second time, slowly: tables and loops in NumPy and Python integers, sharing no code with the package.

Grids are enumerated and searched instead of rounded by arithmetic, sums are exact, blocks are visited one by one.
"""

import numpy as np

E2M1_GRID = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
# E4M3 from its definition: 4 exponent bits with bias 7, 3 mantissa bits; the code 0x7F is NaN.
E4M3_GRID = np.array(
    [(code % 8) / 8 * 2.0**-6 if code < 8 else (1 + code % 8 / 8) * 2.0 ** (code // 8 - 7) for code in range(127)]
)
FP32_MAX = np.finfo(np.float32).max


def nearest_index(grid: np.ndarray, value: float) -> int:
    """Index of the closest grid point; a tie goes to the even index, beyond the end it saturates."""
    distance = np.abs(grid - np.float64(value))
    closest = np.flatnonzero(distance == distance.min())
    return int(closest[closest % 2 == 0][0] if len(closest) == 2 else closest[0])


def encode_e4m3(value: float) -> int:
    return 0x7F if np.isnan(value) else nearest_index(E4M3_GRID, min(float(value), 448.0))


def decode_e4m3(code: int) -> np.float32:
    return np.float32(np.nan) if code == 0x7F else np.float32(E4M3_GRID[code])


def nearest_code(scaled: float) -> int:
    if np.isnan(scaled):
        return 0
    return nearest_index(E2M1_GRID, min(abs(float(scaled)), 6.0)) + (8 if scaled < 0 else 0)


def stochastic_code(scaled: np.float32, byte: int) -> int:
    """Up by byte/256 of the step at the value, added in one fp32 rounding, then down to the grid."""
    if np.isnan(scaled):
        return 0
    size = min(abs(float(scaled)), 6.0)
    step = 0.5 if size < 2 else 1.0 if size < 4 else 2.0
    moved = float(np.float32(size + byte / 256 * step))  # the argument is exact in float64
    return int(np.searchsorted(E2M1_GRID, moved, side="right")) - 1 + (8 if np.signbit(scaled) else 0)


def random_byte(key: int, row: int, column: int) -> int:
    """The byte of one element, in Python integers."""
    mask_32, mask_64 = 2**32 - 1, 2**64 - 1
    state = ((row + 1) * 0x9E3779B97F4A7C15 + key) & mask_64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask_64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask_64
    state ^= state >> 31
    word = (column // 4 + (state & mask_32)) & mask_32
    word = ((word ^ (word >> 16)) * 0x7FEB352D) & mask_32
    word = (((word ^ (word >> 15)) + (state >> 32)) * 0x846CA68B) & mask_32
    word ^= word >> 16
    return (word >> (8 * (column % 4))) & 0xFF


def bf16_nearest(value: float) -> float:
    """Round a float64 to BF16 without an intermediate rounding."""
    if value == 0 or not np.isfinite(value):
        return value
    exponent = max(int(np.floor(np.log2(abs(value)))), -126)
    unit = 2.0 ** (exponent - 7)
    return float(np.rint(value / unit) * unit)  # rint rounds ties to even


def hadamard(x: np.ndarray, sign_mask: int) -> np.ndarray:
    """Transform groups of 16 along the last dim with exact sums and one rounding to BF16."""
    matrix = np.array([[0.25 * (-1.0) ** (i & j).bit_count() for j in range(16)] for i in range(16)])
    signs = np.array([-1.0 if sign_mask >> i & 1 else 1.0 for i in range(16)])
    out = np.empty(x.shape, dtype=np.float64)
    for row in range(x.shape[0]):
        for first in range(0, x.shape[1], 16):
            sums = (x[row, first : first + 16].astype(np.float64) * signs) @ matrix
            out[row, first : first + 16] = [bf16_nearest(value) for value in sums]
    return out.astype(np.float32)


def quantize(
    x: np.ndarray, *, tile: bool = False, amax: float | None = None, random: tuple[int, int, int] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Quantize fp32 [R, C], dims multiples of 16, along C.

    Args:
        x: The matrix.
        tile: 16x16 blocks instead of 1x16.
        amax: The tensor's amax, if not its own.
        random: Key, row offset and column offset of stochastic rounding.

    Returns:
        Unpacked codes [R, C] and scale bytes [R, C/16].
    """
    x = x.astype(np.float32)
    codes = np.zeros(x.shape, dtype=np.uint8)
    scales = np.zeros((x.shape[0], x.shape[1] // 16), dtype=np.uint8)
    height = 16 if tile else 1
    largest = np.float32(np.abs(x).max() if amax is None else amax)
    with np.errstate(all="ignore"):
        encode = np.float32(2688.0) / largest
        encode = FP32_MAX if encode > FP32_MAX else encode
        encode = np.float32(1.0) if encode == 0 else encode
        for row in range(0, x.shape[0], height):
            for column in range(0, x.shape[1], 16):
                block = (slice(row, row + height), slice(column, column + 16))
                codes[block], scale = _quantize_block(x[block], encode, (row, column), random)
                scales[row : row + height, column // 16] = scale
    return codes, scales


def _quantize_block(
    block: np.ndarray, encode: np.float32, origin: tuple[int, int], random: tuple[int, int, int] | None
) -> tuple[np.ndarray, int]:
    decode = np.float32(1.0) / encode
    sixth = np.float32(1.0) / np.float32(6.0)
    wanted = np.abs(block).max() * (encode * sixth)
    scale = encode_e4m3(wanted)
    factor = np.float32(1.0) / (decode_e4m3(scale) * decode)
    factor = FP32_MAX if factor > FP32_MAX else factor
    codes = np.empty(block.shape, dtype=np.uint8)
    for (i, j), element in np.ndenumerate(block):
        scaled = element * factor
        if random is None:
            codes[i, j] = nearest_code(scaled)
        else:
            key, row_offset, column_offset = random
            byte = random_byte(key, row_offset + origin[0] + i, column_offset + origin[1] + j)
            codes[i, j] = stochastic_code(scaled, byte)
    return codes, scale
