"""The C++ twin against the oracle, bit for bit, over shapes, dtypes, layouts, values and specs."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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
    HADAMARD_SIZES,
    MX_FORMATS,
    Block,
    Format,
    GlobalScale,
    HadamardSigns,
    OperandSpec,
    Rounding,
    ScaleRule,
)
from tests.support.tensors import FILLS, filled, format_spec, operand_spec, same_bits

FOUR_OVER_SIX = (ScaleRule.four_over_six_mae, ScaleRule.four_over_six_mse)
LAYOUTS = ("contiguous", "transposed", "every_second_row", "every_second_column", "expanded", "offset")
FORMATS = [Format.nvfp4, *MX_FORMATS, *FP8_FORMATS]
BLOCKS = {
    **dict.fromkeys(MX_FORMATS, (Block.row_1x32, Block.tile_32x32)),
    **dict.fromkeys(FP8_FORMATS, (Block.none, Block.none, Block.row_1x128, Block.tile_128x128)),
    Format.nvfp4: (Block.row_1x16, Block.tile_16x16),
}


@st.composite
def specs(draw: st.DrawFn) -> OperandSpec:
    kind = draw(st.sampled_from(["plain", "plain", "plain", "hadamard", "hadamard", "rows", "four_over_six"]))
    format = Format.nvfp4 if kind == "four_over_six" else draw(st.sampled_from(FORMATS))
    block = draw(st.sampled_from(BLOCKS[format]))
    if kind == "four_over_six":
        maximum = draw(st.sampled_from([256, 448]))
        return operand_spec(block=block, scale_rule=draw(st.sampled_from(FOUR_OVER_SIX)), block_scale_max=maximum)
    if kind == "rows" and format not in MX_FORMATS:
        return format_spec(format, block=BLOCKS[format][0], global_scale=GlobalScale.row)
    rules = {Format.nvfp4: ScaleRule.clip_safe, **dict.fromkeys(MX_FORMATS, ScaleRule.floor)}
    chunks = [None, GlobalScale.block_128] if format is Format.nvfp4 else [None]
    return format_spec(
        format,
        block=block,
        global_scale=draw(st.sampled_from(chunks)),
        rounding=draw(st.sampled_from(list(Rounding))),
        scale_rule=draw(st.sampled_from([ScaleRule.amax, rules.get(format, ScaleRule.amax)])),
        hadamard=draw(st.sampled_from(list(HadamardSigns))) if kind == "hadamard" else None,
        hadamard_size=draw(st.sampled_from(HADAMARD_SIZES)),
    )


@st.composite
def matrices(draw: st.DrawFn) -> torch.Tensor:
    rows, columns = (2 * draw(st.integers(1, 40)) for _ in range(2))
    if draw(st.integers(0, 5)) == 0:  # wider than what a kernel handles at once
        rows, columns = draw(st.sampled_from([(16, 1100), (16, 2064), (300, 32), (18, 1034)]))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.bfloat16, torch.float32, torch.float16]))
    fill, seed = draw(st.sampled_from(FILLS)), draw(st.integers(0, 2**31))
    match draw(st.sampled_from(LAYOUTS)):
        case "transposed":
            return filled(columns, rows, dtype=dtype, fill=fill, seed=seed).t()
        case "every_second_row":
            return filled(2 * rows, columns, dtype=dtype, fill=fill, seed=seed)[::2]
        case "every_second_column":
            return filled(rows, 2 * columns, dtype=dtype, fill=fill, seed=seed)[:, ::2]
        case "expanded":
            return filled(1, columns, dtype=dtype, fill=fill, seed=seed).expand(rows, columns)
        case "offset":
            return filled(rows + 2, columns + 3, dtype=dtype, fill=fill, seed=seed)[1:-1, 2:-1]
        case _:
            return filled(rows, columns, dtype=dtype, fill=fill, seed=seed)


def whole_groups(x: torch.Tensor, spec: OperandSpec) -> torch.Tensor:
    """Repeat and cut to whole groups where the transform needs them."""
    size = spec.hadamard_size
    if not size:
        return x
    rows, columns = (max(size, length // size * size) for length in x.shape)
    return x.repeat(-(-rows // x.shape[0]), -(-columns // x.shape[1]))[:rows, :columns]


@settings(max_examples=400, deadline=None)
@given(x=matrices(), spec=specs(), direction=st.sampled_from(list(Direction)), key=st.integers(0, 2**64 - 1))
def test_every_function_gives_the_bits_of_the_oracle(
    x: torch.Tensor, spec: OperandSpec, direction: Direction, key: int
):
    x = whole_groups(x, spec)
    segments = {"row_segment": 16, "row_stride": 50, "column_segment": 4 * (1 + key % 9), "column_stride": 64}
    stream = RandomStream(key, row_offset=key % 1000, column_offset=4 * (key % 77), **(segments if key % 2 else {}))
    stream = stream if spec.rounding is Rounding.stochastic else None
    is_drawn = spec.hadamard_signs in (HadamardSigns.per_layer, HadamardSigns.per_call)
    sign_mask = key * 0xF0E1D2C3B4A59687 & (1 << 128) - 1 if is_drawn else None
    results = []
    for backend in ("oracle", "compiled"):
        with use(backend):
            amax = compute_amax(x, spec, direction=direction, sign_mask=sign_mask)
            how = {"direction": direction, "stream": stream, "sign_mask": sign_mask}
            quantized = quantize(x, spec, **how)
            operand = quantize_operand(x, spec, **how)
            smaller = quantize_operand(x, spec, amax=amax / 3, **how)
            unpacked = gemm_operand(quantized)
            results.append(
                {
                    "amax": amax,
                    "codes": quantized.codes,
                    "block_scale": quantized.block_scale,
                    "operand": operand.values,
                    "operand with another amax": smaller.values,
                    "unpacked": unpacked.values,
                    "dequantized": dequantize(quantized),
                }
            )
    for name, expected in results[0].items():
        assert same_bits(results[1][name], expected), name


def test_the_result_does_not_depend_on_the_number_of_threads():
    x = filled(80, 1100, dtype=torch.bfloat16, fill="normal", seed=0)
    spec = operand_spec(rounding=Rounding.stochastic)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        results.append(
            [quantize(x, spec, direction=direction, stream=RandomStream(1)).codes for direction in Direction]
        )
    torch.set_num_threads(before)
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_torch_compile_sees_one_call_and_no_graph_break():
    x = filled(32, 64, dtype=torch.bfloat16, fill="normal", seed=1)
    w = filled(48, 64, dtype=torch.float32, fill="normal", seed=2)
    tile = operand_spec(block=Block.tile_16x16)
    transformed = operand_spec(hadamard=HadamardSigns.fixed)

    def run(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        column = quantize(x, transformed, direction=Direction.column)
        row = quantize_operand(w, tile, direction=Direction.row)
        return column.codes, column.block_scale, column.amax, gemm_operand(column).values, row.values

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")(x, w)
    assert all(same_bits(*pair) for pair in zip(compiled, run(x, w), strict=True))


def test_the_shapes_under_compilation_are_the_real_ones():
    """Fake results must have the shapes of real ones, padded dims included."""
    x = filled(24, 40, dtype=torch.bfloat16, fill="normal", seed=3)
    for direction in Direction:
        for function, fields in ((quantize, ("codes", "block_scale")), (quantize_operand, ("values",))):
            spec = operand_spec(block=Block.tile_16x16)
            compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
            got, expected = (call(x, spec, direction=direction) for call in (compiled, function))
            assert all(same_bits(getattr(got, field), getattr(expected, field)) for field in fields)
