from itertools import pairwise

import numpy as np
import pytest
import torch

from nvfp4_train.numerics.formats import unpack_codes
from nvfp4_train.numerics.kernels import use
from nvfp4_train.numerics.quantize import (
    Direction,
    compute_amax,
    dequantize,
    gemm_operand,
    quantize,
    quantize_operand,
)
from nvfp4_train.numerics.random import RandomStream
from nvfp4_train.numerics.spec import (
    FP8_FORMATS,
    MX_FORMATS,
    Block,
    Format,
    GlobalScale,
    HadamardSigns,
    OperandSpec,
    Rounding,
)
from tests.support import oracle
from tests.support.tensors import FILLS, filled, format_spec, operand_spec, same_bits

BLOCKS = [Block.row_1x16, Block.tile_16x16]
DIRECTIONS = list(Direction)
KEY = 0x0123456789ABCDEF


@pytest.fixture(params=["oracle", "compiled"], autouse=True)
def _backend(request: pytest.FixtureRequest):
    with use(request.param):
        yield


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("rounding", list(Rounding))
def test_codes_and_scales_are_those_of_the_second_implementation(fill: str, block: Block, rounding: Rounding):
    x = filled(16, 48, dtype=torch.float32, fill=fill, seed=7)
    stochastic = rounding is Rounding.stochastic
    stream = RandomStream(KEY, row_offset=3, column_offset=12) if stochastic else None
    quantized = quantize(x, operand_spec(block=block, rounding=rounding), direction=Direction.row, stream=stream)
    codes, scales = oracle.quantize(
        x.numpy(), tile=block is Block.tile_16x16, random=(KEY, 3, 12) if stochastic else None
    )
    assert np.array_equal(unpack_codes(quantized.codes).numpy(), codes)
    assert np.array_equal(quantized.block_scale.numpy(), scales)


@pytest.mark.parametrize("hadamard", [None, HadamardSigns.fixed])
def test_column_direction_quantizes_the_transpose(hadamard: HadamardSigns | None):
    x = filled(32, 24, dtype=torch.bfloat16, fill="normal", seed=1)
    transposed = x.t().float().numpy()
    if hadamard:
        transposed = oracle.hadamard(transposed, 0xD7E8)
    quantized = quantize(x, operand_spec(hadamard=hadamard), direction=Direction.column)
    codes, scales = oracle.quantize(transposed)
    assert quantized.shape == (24, 32)
    assert quantized.amax.item() == np.abs(transposed).max()
    assert np.array_equal(unpack_codes(quantized.codes).numpy(), codes)
    assert np.array_equal(quantized.block_scale.numpy(), scales)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("shape", [(32, 64), (24, 40), (2, 18)])
def test_operands_are_the_unpacked_codes(direction: Direction, block: Block, shape: tuple[int, int]):
    x = filled(*shape, dtype=torch.bfloat16, fill="normal", seed=2)
    spec = operand_spec(block=block)
    quantized = quantize(x, spec, direction=direction)
    operand = quantize_operand(x, spec, direction=direction)
    unpacked = gemm_operand(quantized)
    assert operand.values.dtype is torch.bfloat16
    assert operand.values.shape == quantized.shape == (shape if direction is Direction.row else shape[::-1])
    assert same_bits(operand.values, unpacked.values)
    assert same_bits(operand.amax, unpacked.amax)
    scaled = operand.values.float() * (quantized.amax / 2688)
    torch.testing.assert_close(dequantize(quantized), scaled, rtol=1e-6, atol=0)


@pytest.mark.parametrize("block", BLOCKS)
def test_the_error_is_that_of_four_bits(block: Block):
    x = filled(64, 64, dtype=torch.bfloat16, fill="normal", seed=3)
    restored = dequantize(quantize(x, operand_spec(block=block), direction=Direction.row), dtype=torch.bfloat16)
    error = ((restored - x).float().norm() / x.float().norm()).item()
    assert 0.08 < error < 0.13


def test_a_tile_is_the_same_in_both_directions():
    w = filled(48, 32, dtype=torch.bfloat16, fill="normal", seed=4)
    spec = operand_spec(block=Block.tile_16x16)
    row, column = (quantize_operand(w, spec, direction=direction) for direction in DIRECTIONS)
    assert same_bits(row.transposed().values, column.values)


def test_row_blocks_cannot_be_transposed():
    operand = quantize_operand(torch.ones(16, 16), operand_spec(), direction=Direction.row)
    with pytest.raises(ValueError, match="quantize in direction column"):
        operand.transposed()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_one_scale_per_row(direction: Direction):
    x = filled(32, 48, dtype=torch.bfloat16, fill="normal", seed=5) * torch.logspace(-3, 3, 32).unsqueeze(1)
    spec = operand_spec(global_scale=GlobalScale.row)
    quantized = quantize(x, spec, direction=direction)
    matrix = x if direction is Direction.row else x.t()
    assert torch.equal(quantized.amax, matrix.abs().amax(dim=1).float())
    for row in (0, 20):
        alone = quantize(matrix[row : row + 1], operand_spec(), direction=Direction.row)
        assert torch.equal(quantized.codes[row], alone.codes[0])
        assert torch.equal(quantized.block_scale[row], alone.block_scale[0])


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("rounding", list(Rounding))
@pytest.mark.parametrize("hadamard", [None, HadamardSigns.fixed])
def test_shards_with_a_common_amax_give_the_bytes_of_the_whole(
    direction: Direction, rounding: Rounding, hadamard: HadamardSigns | None
):
    x = filled(64, 96, dtype=torch.bfloat16, fill="normal", seed=6)
    spec = operand_spec(rounding=rounding, hadamard=hadamard)
    stream = RandomStream(KEY) if rounding is Rounding.stochastic else None
    whole = quantize(x, spec, direction=direction, stream=stream)
    for row, column in ((0, 0), (32, 0), (0, 48), (32, 48)):
        part = x[row : row + 32, column : column + 48]
        first = (row, column) if direction is Direction.row else (column, row)
        shard_stream = RandomStream(KEY, *first) if stream else None
        shard = quantize(part, spec, direction=direction, amax=whole.amax, stream=shard_stream)
        rows, columns = shard.shape
        expected = whole.codes[first[0] : first[0] + rows, first[1] // 2 : (first[1] + columns) // 2]
        assert torch.equal(shard.codes, expected)


STOCHASTIC = {
    "nvfp4": operand_spec(rounding=Rounding.stochastic),
    "nvfp4, transformed": operand_spec(rounding=Rounding.stochastic, hadamard=HadamardSigns.fixed),
    "nvfp4, tiles": operand_spec(rounding=Rounding.stochastic, block=Block.tile_16x16),
    **{str(format): format_spec(format, rounding=Rounding.stochastic) for format in (*MX_FORMATS, *FP8_FORMATS)},
}


@pytest.mark.parametrize("name", STOCHASTIC)
@pytest.mark.parametrize(("direction", "dim"), [(Direction.row, "row"), (Direction.column, "column")])
def test_slices_of_sequences_give_the_bytes_of_the_whole(name: str, direction: Direction, dim: str):
    """Three sequences of 64 tokens, of which a rank holds tokens 32 to 63."""
    spec, x = STOCHASTIC[name], filled(3 * 64, 96, dtype=torch.bfloat16, fill="normal", seed=6)
    local = x.view(3, 64, 96)[:, 32:].reshape(-1, 96)
    tokens = {"offset": 5 * 64 + 32, "segment": 32, "stride": 64}
    start = RandomStream(KEY, **{f"{dim}_offset": 5 * 64})
    whole = quantize(x, spec, direction=direction, stream=start)
    stream = RandomStream(KEY, **{f"{dim}_{key}": value for key, value in tokens.items()})
    how = {"direction": direction, "amax": whole.amax, "stream": stream}
    part, operand = quantize(local, spec, **how), quantize_operand(local, spec, **how)
    values = gemm_operand(whole).values.movedim(1 if dim == "column" else 0, 0)
    held = values.unflatten(0, (3, 64))[:, 32:].flatten(0, 1)
    expected = held.t() if dim == "column" else held
    assert torch.equal(operand.values, expected)
    assert torch.equal(gemm_operand(part).values, expected)
    unmoved = RandomStream(KEY, **{f"{dim}_offset": tokens["offset"]})
    assert not torch.equal(quantize_operand(local, spec, **(how | {"stream": unmoved})).values, expected)


def test_stochastic_rounding_is_unbiased():
    """Within four standard errors, in each interval between two codes."""
    grid = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    spec = operand_spec(rounding=Rounding.stochastic)
    for interval, (lower, upper) in enumerate(pairwise(grid)):
        value = lower + (upper - lower) * 77 / 256
        x = torch.full((256, 16), value)
        x[:, 0] = 6.0  # the block maximum, so that the factor is exactly 1 with this amax
        stream = RandomStream(KEY + interval)
        values = dequantize(quantize(x, spec, direction=Direction.row, amax=torch.tensor([2688.0]), stream=stream))
        mean = values[:, 1:].double().mean().item()
        standard_error = (upper - lower) * (77 / 256 * 179 / 256 / (256 * 15)) ** 0.5
        assert abs(mean - value) < 4 * standard_error


def test_stochastic_streams_differ():
    x = filled(64, 64, dtype=torch.bfloat16, fill="normal", seed=8)
    spec = operand_spec(rounding=Rounding.stochastic)
    first, second = (quantize(x, spec, direction=Direction.row, stream=RandomStream(key)) for key in (1, 2))
    assert (first.codes != second.codes).float().mean() > 0.2


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("hadamard", [None, HadamardSigns.fixed])
@pytest.mark.parametrize("block", BLOCKS)
def test_nan_is_never_lost(direction: Direction, hadamard: HadamardSigns | None, block: Block):
    x = torch.ones(32, 32, dtype=torch.bfloat16)
    x[5, 7] = float("nan")
    spec = operand_spec(block=block, hadamard=hadamard)
    quantized = quantize(x, spec, direction=direction)
    assert quantized.amax.isnan().all()
    assert (quantized.block_scale == 0x7F).all()
    assert (quantized.codes == 0).all()
    assert quantize_operand(x, spec, direction=direction).values.isnan().all()
    # an amax that was agreed on without noticing does not hide it
    agreed = quantize_operand(x, spec, direction=direction, amax=torch.ones(1))
    assert agreed.values.isnan().any()


def test_infinity_is_never_lost():
    x = torch.ones(16, 16, dtype=torch.bfloat16)
    x[3, 3] = float("inf")
    assert dequantize(quantize(x, operand_spec(), direction=Direction.row))[3, 3].isinf()


def test_leading_dims_are_flattened():
    x = filled(24, 32, dtype=torch.bfloat16, fill="normal", seed=9)
    for direction in DIRECTIONS:
        assert torch.equal(
            quantize(x.view(2, 12, 32), operand_spec(), direction=direction).codes,
            quantize(x, operand_spec(), direction=direction).codes,
        )


def test_memory_is_four_bits_and_a_byte_per_block():
    quantized = quantize(torch.ones(32, 64), operand_spec(), direction=Direction.row)
    assert quantized.num_bytes == 32 * 64 // 2 + 32 * 64 // 16 + 4


@pytest.mark.parametrize(("format", "dtype"), [(Format.bf16, torch.bfloat16), (Format.fp32, torch.float32)])
def test_high_precision_operands_are_casts(format: Format, dtype: torch.dtype):
    x = filled(8, 12, dtype=torch.float32, fill="normal", seed=0)
    spec = OperandSpec(format=format, block=Block.none, rounding=Rounding.nearest_even)
    row, column = (quantize_operand(x, spec, direction=direction) for direction in DIRECTIONS)
    assert row.amax is None
    assert same_bits(row.values, x.to(dtype))
    assert same_bits(column.values, x.t().to(dtype))
    assert same_bits(row.transposed().values, column.values)
    with pytest.raises(ValueError, match="has no codes"):
        quantize(x, spec, direction=Direction.row)


@pytest.mark.parametrize(
    ("x", "spec", "direction", "message"),
    [
        (torch.ones(16, 16), operand_spec(rounding=Rounding.stochastic), Direction.row, "needs a stream"),
        (torch.ones(16, 15), operand_spec(), Direction.row, "dim of 15 elements"),
        (torch.ones(15, 16), operand_spec(), Direction.column, "dim of 15 elements"),
        (torch.ones(24, 16), operand_spec(hadamard=HadamardSigns.fixed), Direction.column, "multiple of 16"),
        (torch.ones(16), operand_spec(), Direction.row, "at least 2 dims"),
        (torch.ones(16, 16, dtype=torch.float64), operand_spec(), Direction.row, "found torch.float64"),
    ],
)
def test_bad_input_is_refused(x: torch.Tensor, spec: OperandSpec, direction: Direction, message: str):
    for round_to in (quantize, quantize_operand):
        with pytest.raises(ValueError, match=message):
            round_to(x, spec, direction=direction)


@pytest.mark.parametrize("amax", [torch.ones(2), torch.ones(1, dtype=torch.float64), torch.ones(())])
def test_a_bad_amax_is_refused(amax: torch.Tensor):
    with pytest.raises(ValueError, match=r"amax: expected fp32 \[1\]"):
        quantize(torch.ones(16, 16), operand_spec(), direction=Direction.row, amax=amax)


def test_amax_is_its_own_step():
    x = filled(32, 32, dtype=torch.bfloat16, fill="normal", seed=1)
    spec = operand_spec(hadamard=HadamardSigns.fixed)
    amax = compute_amax(x, spec, direction=Direction.column)
    given, own = (quantize(x, spec, direction=Direction.column, amax=value) for value in (amax, None))
    assert same_bits(given.amax, own.amax)
    assert torch.equal(given.codes, own.codes)
