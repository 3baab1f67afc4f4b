"""All formats a second time, slowly: tables and loops in NumPy and Python integers, sharing no code with the package.

Grids are enumerated and searched instead of rounded by arithmetic, sums are exact, blocks are visited one by one.
"""

import numpy as np

E2M1_GRID = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
# E4M3 from its definition: 4 exponent bits with bias 7, 3 mantissa bits; the code 0x7F is NaN.
E4M3_GRID = np.array(
    [(code % 8) / 8 * 2.0**-6 if code < 8 else (1 + code % 8 / 8) * 2.0 ** (code // 8 - 7) for code in range(127)]
)
# E5M2: 5 exponent bits with bias 15, 2 mantissa bits; codes from 0x7C on are infinity and NaN.
E5M2_GRID = np.array(
    [(code % 4) / 4 * 2.0**-14 if code < 4 else (1 + code % 4 / 4) * 2.0 ** (code // 4 - 15) for code in range(124)]
)
GRIDS = {"e2m1": E2M1_GRID, "e4m3": E4M3_GRID, "e5m2": E5M2_GRID}
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


def hadamard(x: np.ndarray, sign_mask: int, *, size: int = 16) -> np.ndarray:
    """Transform groups along the last dim with exact sums and one rounding to BF16."""
    matrix = np.array([[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)])
    signs = np.array([-1.0 if sign_mask >> i & 1 else 1.0 for i in range(size)])
    out = np.empty(x.shape, dtype=np.float64)
    for row in range(x.shape[0]):
        for first in range(0, x.shape[1], size):
            sums = (x[row, first : first + size].astype(np.float64) * signs) @ matrix / np.sqrt(size)
            out[row, first : first + size] = [bf16_nearest(value) for value in sums]
    return out.astype(np.float32)


def quantize(
    x: np.ndarray,
    *,
    tile: bool = False,
    amax: float | None = None,
    random: tuple[int, int, int] | None = None,
    target: float = 6.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Quantize fp32 [R, C], dims multiples of 16, to nvfp4 along C.

    Args:
        x: The matrix.
        tile: 16x16 blocks instead of 1x16.
        amax: The tensor's amax, if not its own.
        random: Key, row offset and column offset of stochastic rounding.
        target: What block maxima are mapped to.

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
                codes[block], scale = _quantize_block(x[block], encode, (row, column), random, target)
                scales[row : row + height, column // 16] = scale
    return codes, scales


def _quantize_block(
    block: np.ndarray,
    encode: np.float32,
    origin: tuple[int, int],
    random: tuple[int, int, int] | None,
    target: float,
) -> tuple[np.ndarray, int]:
    decode = np.float32(1.0) / encode
    inverse = np.float32(1.0 / target)
    wanted = np.abs(block).max() * (encode * inverse)
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


def quantize_outer(x: np.ndarray, *, tile: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Quantize fp32 [R, C], dims multiples of 128, to nvfp4 with an FP32 scale per 1x128 or 128x128 elements."""
    codes = np.zeros(x.shape, dtype=np.uint8)
    scales = np.zeros((x.shape[0], x.shape[1] // 16), dtype=np.uint8)
    height = 128 if tile else 1
    for row in range(0, x.shape[0], height):
        for column in range(0, x.shape[1], 128):
            chunk = (slice(row, row + height), slice(column, column + 128))
            # the smallest amax whose factor is finite
            amax = max(float(np.abs(x[chunk]).max()), float(np.float32(2688.0 / FP32_MAX)))
            amax = np.nan if np.isnan(x[chunk]).any() else amax
            result = quantize(x[chunk], tile=tile, amax=amax)
            codes[chunk], scales[chunk[0], column // 16 : column // 16 + 8] = result
    return codes, scales


def element_code(scaled: float, element: str, byte: int | None = None) -> int:
    """The code of a number in an element format, nearest even, or with a random byte stochastic."""
    grid = GRIDS[element]
    if element == "e2m1":
        return nearest_code(scaled) if byte is None else stochastic_code(np.float32(scaled), byte)
    if not np.isfinite(scaled):
        return 0x7F
    size = min(abs(float(scaled)), grid[-1])
    if byte is None:
        code = nearest_index(grid, size)
    else:
        lower = int(np.searchsorted(grid, size, side="right")) - 1
        step = grid[lower + 1] - grid[lower] if lower + 1 < len(grid) else grid[-1] - grid[-2]
        moved = float(np.float32(size + byte / 256 * step))
        code = int(np.searchsorted(grid, moved, side="right")) - 1
    return code + (0x80 if np.signbit(scaled) else 0)


def element_value(code: int, element: str) -> float:
    """The number that a code stands for."""
    sign_bit = 8 if element == "e2m1" else 0x80
    size = code % sign_bit
    value = float(GRIDS[element][size]) if size < len(GRIDS[element]) else float("nan")
    return -value if code >= sign_bit else value


def power_of_two_scale(largest: float, element: str, *, floor: bool = False) -> int:
    """The E8M0 byte for a block maximum, searched over all scales.

    Rounded up: the smallest scale with which no element exceeds the largest one. Floor: the largest power of two in the
    maximum over the largest in the largest element.
    """
    if not np.isfinite(largest):
        return 0xFF
    grid_max = GRIDS[element][-1]
    if not floor:
        return next(byte for byte in range(255) if grid_max * 2.0 ** (byte - 127) >= largest)
    in_grid = max(power for power in range(20) if 2.0**power <= grid_max)
    fitting = [byte for byte in range(255) if 2.0 ** (byte - 127 + in_grid) <= largest]
    return fitting[-1] if fitting else 0


def quantize_mx(
    x: np.ndarray,
    element: str,
    *,
    tile: bool = False,
    floor: bool = False,
    random: tuple[int, int, int] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Quantize fp32 [R, C], dims multiples of 32, to elements and power-of-two scales of 1x32 or 32x32 blocks."""
    codes = np.zeros(x.shape, dtype=np.uint8)
    scales = np.zeros((x.shape[0], x.shape[1] // 32), dtype=np.uint8)
    height = 32 if tile else 1
    for row in range(0, x.shape[0], height):
        for column in range(0, x.shape[1], 32):
            block = (slice(row, row + height), slice(column, column + 32))
            scale = power_of_two_scale(float(np.abs(x[block]).max()), element, floor=floor)
            scales[row : row + height, column // 32] = scale
            for i in range(height):
                for j in range(32):
                    here = (row + i, column + j)
                    scaled = np.nan if scale == 0xFF else float(np.float32(float(x[here]) / 2.0 ** (scale - 127)))
                    codes[here] = element_code(scaled, element, _byte_at(random, *here))
    return codes, scales


def quantize_fp8(
    x: np.ndarray, element: str, amax: np.ndarray, *, random: tuple[int, int, int] | None = None
) -> np.ndarray:
    """Quantize fp32 [R, C] to 8-bit codes; amax, fp32 [R, C], is that of each element's tensor, row or block."""
    largest = np.float32(GRIDS[element][-1])
    codes = np.zeros(x.shape, dtype=np.uint8)
    with np.errstate(all="ignore"):
        for here in np.ndindex(*x.shape):
            smallest = np.float32(float(largest) / float(FP32_MAX))
            below = smallest if amax[here] < smallest else amax[here]
            factor = min(largest / below, FP32_MAX) if not np.isinf(below) else np.float32(1.0)
            scaled = np.nan if np.isnan(below) else np.float32(x[here] * np.float32(factor))
            codes[here] = element_code(float(scaled), element, _byte_at(random, *here))
    return codes


def _byte_at(random: tuple[int, int, int] | None, row: int, column: int) -> int | None:
    if random is None:
        return None
    key, row_offset, column_offset = random
    return random_byte(key, row_offset + row, column_offset + column)
