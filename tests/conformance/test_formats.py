"""MX and FP8 formats, and NVFP4's options, against a slow second implementation."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4_train.numerics.formats import ELEMENT, unpack_codes
from nvfp4_train.numerics.kernels import use
from nvfp4_train.numerics.quantize import (
    Direction,
    QuantizedTensor,
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
    ScaleRule,
)
from tests.support import oracle
from tests.support.tensors import FILLS, filled, format_spec, operand_spec, same_bits

ELEMENT_NAME = {
    Format.mxfp4: "e2m1",
    Format.mxfp8_e4m3: "e4m3",
    Format.mxfp8_e5m2: "e5m2",
    Format.fp8_e4m3: "e4m3",
    Format.fp8_e5m2: "e5m2",
}
KEY = 0x0123456789ABCDEF
MAGNITUDES = st.sampled_from([2.0**-149, 1e-44, 1e-38, 2.0**-126, 1e-20, 0.3, 1.0, 5.0, 6.0, 1e20, 1e37, 3e38])


@pytest.fixture(params=["oracle", "compiled"], autouse=True)
def _backend(request: pytest.FixtureRequest):
    with use(request.param):
        yield


def unpacked(quantized: QuantizedTensor) -> np.ndarray:
    return (unpack_codes(quantized.codes) if quantized.spec.is_packed else quantized.codes).numpy()


def stream_of(spec: OperandSpec) -> tuple[RandomStream | None, tuple[int, int, int] | None]:
    """The same random bytes for both implementations."""
    if spec.rounding is Rounding.nearest_even:
        return None, None
    return RandomStream(KEY, row_offset=3, column_offset=12), (KEY, 3, 12)


def check_mx(x: torch.Tensor, spec: OperandSpec) -> None:
    stream, random = stream_of(spec)
    quantized = quantize(x, spec, direction=Direction.row, stream=stream)
    codes, scales = oracle.quantize_mx(
        x.float().numpy(),
        ELEMENT_NAME[spec.format],
        tile=spec.is_tile,
        floor=spec.scale_rule is ScaleRule.floor,
        random=random,
    )
    assert quantized.amax.shape == (0,)
    assert np.array_equal(quantized.block_scale.numpy(), scales)
    assert np.array_equal(unpacked(quantized), codes)


def amax_of_elements(x: np.ndarray, spec: OperandSpec) -> np.ndarray:
    """The amax of each element's tensor, row or block, fp32 like x."""
    height, width = {
        Block.row_1x128: (1, 128),
        Block.tile_128x128: (128, 128),
        Block.none: x.shape if spec.global_scale is GlobalScale.tensor else (1, x.shape[1]),
    }[spec.block]
    amax = np.empty_like(x)
    for row in range(0, x.shape[0], height):
        for column in range(0, x.shape[1], width):
            block = (slice(row, row + height), slice(column, column + width))
            amax[block] = np.abs(x[block]).max()
    return amax


def check_fp8(x: torch.Tensor, spec: OperandSpec) -> None:
    stream, random = stream_of(spec)
    quantized = quantize(x, spec, direction=Direction.row, stream=stream)
    matrix = x.float().numpy()
    codes = oracle.quantize_fp8(matrix, ELEMENT_NAME[spec.format], amax_of_elements(matrix, spec), random=random)
    assert quantized.block_scale.numel() == 0
    assert np.array_equal(unpacked(quantized), codes)


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("block", [Block.row_1x32, Block.tile_32x32])
@pytest.mark.parametrize("format", MX_FORMATS)
def test_mx_codes_and_scales_are_those_of_the_second_implementation(fill: str, block: Block, format: Format):
    x = filled(32, 96, dtype=torch.float32, fill=fill, seed=7)
    check_mx(x, format_spec(format, block=block))


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("format", MX_FORMATS)
@pytest.mark.parametrize("how", [{"scale_rule": ScaleRule.floor}, {"rounding": Rounding.stochastic}])
def test_mx_options_too(fill: str, format: Format, how: dict):
    check_mx(filled(16, 64, dtype=torch.float32, fill=fill, seed=8), format_spec(format, **how))


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("block", [Block.none, Block.row_1x128, Block.tile_128x128])
@pytest.mark.parametrize("format", FP8_FORMATS)
def test_fp8_codes_are_those_of_the_second_implementation(fill: str, block: Block, format: Format):
    """The last blocks are not whole."""
    check_fp8(filled(20, 160, dtype=torch.float32, fill=fill, seed=9), format_spec(format, block=block))


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("format", FP8_FORMATS)
@pytest.mark.parametrize("how", [{"global_scale": GlobalScale.row}, {"rounding": Rounding.stochastic}])
def test_fp8_options_too(fill: str, format: Format, how: dict):
    check_fp8(filled(16, 64, dtype=torch.float32, fill=fill, seed=10), format_spec(format, **how))


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(MAGNITUDES | st.just(0.0) | st.just(float("inf")), min_size=1, max_size=8),
    scale=st.floats(0.5, 1.0),
    format=st.sampled_from([*MX_FORMATS, *FP8_FORMATS]),
    rounding=st.sampled_from(list(Rounding)),
    seed=st.integers(0, 1000),
)
def test_any_magnitudes(values: list[float], scale: float, format: Format, rounding: Rounding, seed: int):
    generator = torch.Generator().manual_seed(seed)
    picked = torch.tensor(values)[torch.randint(0, len(values), (4, 64), generator=generator)]
    signs = torch.randint(0, 2, (4, 64), generator=generator) * 2.0 - 1.0
    spec = format_spec(format, rounding=rounding)
    (check_mx if format in MX_FORMATS else check_fp8)(picked * scale * signs, spec)


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("tile", [False, True])
def test_an_outer_scale_per_128_elements(fill: str, tile: bool):
    x = filled(128 if tile else 8, 256, dtype=torch.float32, fill=fill, seed=11)
    spec = operand_spec(block=Block.tile_16x16 if tile else Block.row_1x16, global_scale=GlobalScale.block_128)
    quantized = quantize(x, spec, direction=Direction.row)
    codes, scales = oracle.quantize_outer(x.numpy(), tile=tile)
    assert quantized.amax.shape == (x.shape[0], 2)
    assert np.array_equal(unpacked(quantized), codes)
    assert np.array_equal(quantized.block_scale.numpy() & 0x7F, scales & 0x7F)


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("rounding", list(Rounding))
def test_clip_safe_scales(fill: str, rounding: Rounding):
    x = filled(16, 48, dtype=torch.float32, fill=fill, seed=12)
    spec = operand_spec(rounding=rounding, scale_rule=ScaleRule.clip_safe)
    stream, random = stream_of(spec)
    quantized = quantize(x, spec, direction=Direction.row, stream=stream)
    codes, scales = oracle.quantize(x.numpy(), random=random, target=6 * 16 / 17)
    assert np.array_equal(unpacked(quantized), codes)
    assert np.array_equal(quantized.block_scale.numpy(), scales)


def test_clip_safe_scales_clip_nothing():
    """The scale of a block may be rounded down by 16/17 and its maximum then lies at 6; the plain rule passes it."""
    x = filled(256, 256, dtype=torch.float32, fill="normal", seed=13)
    largest = x.abs().unflatten(1, (-1, 16)).amax(2)
    decoded = torch.from_numpy(oracle.E4M3_GRID.astype(np.float32))
    scaled = {}
    for rule in (ScaleRule.amax, ScaleRule.clip_safe):
        quantized = quantize(x, operand_spec(scale_rule=rule), direction=Direction.row)
        scaled[rule] = largest / (decoded[quantized.block_scale.long()] * (quantized.amax / 2688))
    assert (scaled[ScaleRule.amax] > 6 * (1 + 1e-6)).float().mean() > 0.3
    assert (scaled[ScaleRule.clip_safe] <= 6 * (1 + 1e-6)).all()


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("format", [*MX_FORMATS, *FP8_FORMATS])
def test_operands_are_the_unpacked_codes(direction: Direction, format: Format):
    x = filled(40, 70, dtype=torch.bfloat16, fill="normal", seed=2)
    for block in (format_spec(format).block, *tiles_of(format)):
        spec = format_spec(format, block=block)
        quantized = quantize(x, spec, direction=direction)
        operand = quantize_operand(x, spec, direction=direction)
        assert operand.values.shape == quantized.shape == ((40, 70) if direction is Direction.row else (70, 40))
        assert same_bits(operand.values, gemm_operand(quantized).values)
        matrix = x if direction is Direction.row else x.t()
        error = (dequantize(quantized) - matrix).norm() / matrix.float().norm()
        bound = {"e2m1": 0.2, "e4m3": 0.04, "e5m2": 0.08}[ELEMENT_NAME[format]]
        assert 0.2 * bound < error < bound


def tiles_of(format: Format) -> tuple[Block, ...]:
    return (Block.tile_32x32,) if format in MX_FORMATS else (Block.row_1x128, Block.tile_128x128)


@pytest.mark.parametrize(
    "spec",
    [
        *(format_spec(format, block=Block.tile_32x32) for format in MX_FORMATS),
        *(format_spec(format) for format in FP8_FORMATS),
        format_spec(Format.fp8_e4m3, block=Block.tile_128x128),
        operand_spec(block=Block.tile_16x16, global_scale=GlobalScale.block_128),
    ],
    ids=lambda spec: f"{spec.format}-{spec.block}",
)
def test_what_does_not_depend_on_the_direction_is_quantized_once(spec: OperandSpec):
    w = filled(144, 272, dtype=torch.bfloat16, fill="wide", seed=4)
    row, column = (quantize_operand(w, spec, direction=direction) for direction in Direction)
    turned = row.transposed()
    assert spec.is_direction_free
    assert same_bits(turned.values, column.values)
    assert same_bits(turned.amax, column.amax)


@pytest.mark.parametrize("format", MX_FORMATS)
def test_a_scale_that_rounds_up_saturates_nothing(format: Format):
    x = filled(64, 128, dtype=torch.float32, fill="wide", seed=5)
    values = dequantize(quantize(x, format_spec(format), direction=Direction.row))
    largest, restored = (tensor.abs().unflatten(1, (-1, 32)).amax(2) for tensor in (x, values))
    half_step = 2.0 ** -(ELEMENT[format].mantissa_bits + 1)
    assert ((restored - largest).abs() <= half_step * largest).all()


def test_the_floor_rule_saturates():
    x = torch.full((1, 32), 7.9)
    up, down = (
        dequantize(quantize(x, format_spec(Format.mxfp4, scale_rule=rule), direction=Direction.row))
        for rule in (ScaleRule.amax, ScaleRule.floor)
    )
    assert up[0, 0] == 8.0
    assert down[0, 0] == 6.0


@pytest.mark.parametrize("format", [*MX_FORMATS, *FP8_FORMATS])
@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_never_lost(format: Format, value: float):
    x = torch.ones(32, 64)
    x[5, 7] = value
    spec = format_spec(format)
    assert not dequantize(quantize(x, spec, direction=Direction.row))[5, 7].isfinite()
    if spec.has_amax:  # nor with a scale from older tensors
        assert quantize_operand(x, spec, direction=Direction.row, amax=torch.ones(1)).values[5, 7].isnan()


@pytest.mark.parametrize("format", FP8_FORMATS)
def test_an_older_amax_saturates_what_is_larger(format: Format):
    x = torch.tensor([[0.5, 1.0, 3.0, -100.0]]).expand(2, 4).contiguous()
    values = dequantize(quantize(x, format_spec(format), direction=Direction.row, amax=torch.ones(1)))
    assert values[0].tolist() == [0.5, 1.0, 1.0, -1.0]


@pytest.mark.parametrize(
    ("format", "bits"),
    [(Format.mxfp4, 4.25), (Format.mxfp8_e4m3, 8.25), (Format.fp8_e4m3, 8.0), (Format.fp8_e5m2, 8.0)],
)
def test_memory(format: Format, bits: float):
    quantized = quantize(torch.ones(64, 128), format_spec(format), direction=Direction.row)
    assert quantized.num_bytes - 4 * quantized.amax.numel() == 64 * 128 * bits / 8


@pytest.mark.parametrize("format", [Format.mxfp4, Format.mxfp8_e4m3, Format.fp8_e5m2])
@pytest.mark.parametrize("direction", list(Direction))
def test_shards_give_the_bytes_of_the_whole(format: Format, direction: Direction):
    x = filled(128, 192, dtype=torch.bfloat16, fill="normal", seed=6)
    hadamard = HadamardSigns.fixed if format is Format.mxfp4 else None
    spec = format_spec(format, rounding=Rounding.stochastic, hadamard=hadamard)
    whole = quantize(x, spec, direction=direction, stream=RandomStream(KEY))
    for row, column in ((0, 0), (64, 0), (0, 96), (64, 96)):
        part = x[row : row + 64, column : column + 96]
        first = (row, column) if direction is Direction.row else (column, row)
        shard = quantize(part, spec, direction=direction, amax=whole.amax, stream=RandomStream(KEY, *first))
        rows, columns = shard.shape
        expected = unpacked(whole)[first[0] : first[0] + rows, first[1] : first[1] + columns]
        assert np.array_equal(unpacked(shard), expected)


@pytest.mark.parametrize("format", [Format.nvfp4, *MX_FORMATS, *FP8_FORMATS])
def test_stochastic_rounding_is_unbiased_in_every_interval(format: Format, request: pytest.FixtureRequest):
    """Within four standard errors over 10^6 draws (10^5 in plain PyTorch)."""
    rows = 4096 if "compiled" in request.node.name else 512
    element = ELEMENT[format]
    grid = oracle.GRIDS[{6.0: "e2m1", 448.0: "e4m3", 57344.0: "e5m2"}[element.largest]]
    every = 1 if len(grid) < 10 else 15
    amax = {Format.nvfp4: torch.tensor([2688.0]), **dict.fromkeys(FP8_FORMATS, torch.tensor([element.largest]))}
    spec = format_spec(format, rounding=Rounding.stochastic)
    for interval, (lower, upper) in enumerate(list(pairwise(grid))[::every]):
        value = lower + (upper - lower) * 77 / 256
        x = torch.full((rows, 256), value)
        x[:, ::16] = element.largest  # block maxima, so that every factor is 1
        how = {"direction": Direction.row, "amax": amax.get(format), "stream": RandomStream(KEY + interval)}
        drawn = dequantize(quantize(x, spec, **how)).unflatten(1, (-1, 16))[:, :, 1:].double()
        standard_error = (upper - lower) * (77 / 256 * 179 / 256 / drawn.numel()) ** 0.5
        assert abs(drawn.mean().item() - value) < 4 * standard_error
        assert set(drawn.unique().tolist()) == {lower, upper}


@pytest.mark.parametrize("rule", [ScaleRule.amax, ScaleRule.clip_safe])
def test_clip_safe_rounding_is_unbiased_at_block_maxima(rule: ScaleRule):
    """The plain rule is not: where its scale was rounded down, the maximum is clipped."""
    x = torch.full((4096, 256), 0.5)
    x[:, ::16] = 6.0 * 1.06  # the plain scale, 1.06, is rounded down to 1
    x[0, 0] = 6.0 * 400
    spec = operand_spec(rounding=Rounding.stochastic, scale_rule=rule)
    quantized = quantize(x, spec, direction=Direction.row, amax=torch.tensor([2688.0]), stream=RandomStream(KEY))
    drawn = dequantize(quantized)[1:, ::16].double()
    bias = abs(drawn.mean().item() - x[1, 0].item())
    standard_error = max(drawn.std().item(), 1e-3) / drawn.numel() ** 0.5
    assert (bias < 4 * standard_error) is (rule is ScaleRule.clip_safe)


def test_shapes_of_amax():
    x = torch.ones(40, 300)
    shapes = {
        (Block.none, GlobalScale.tensor): (1,),
        (Block.none, GlobalScale.row): (40,),
        (Block.row_1x128, GlobalScale.none): (40, 3),
        (Block.tile_128x128, GlobalScale.none): (40, 3),
    }
    for (block, scale), shape in shapes.items():
        spec = format_spec(Format.fp8_e4m3, block=block, global_scale=scale)
        assert compute_amax(x, spec, direction=Direction.row).shape == shape
        with pytest.raises(ValueError, match="amax: expected fp32"):
            quantize(x, spec, direction=Direction.row, amax=torch.ones(7))
