"""Both directions in one pass give the bits of two passes."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nvfp4_train.numerics.both import Cell, compute_amax_both, quantize_both
from nvfp4_train.numerics.kernels import is_compiled, native, use
from nvfp4_train.numerics.quantize import Direction, compute_amax, quantize
from nvfp4_train.numerics.random import RandomStream
from nvfp4_train.numerics.spec import Block, Format, GlobalScale, HadamardSigns, OperandSpec, Rounding
from tests.support.tensors import FILLS, filled, operand_spec, same_bits

MXFP4 = OperandSpec(format=Format.mxfp4, block=Block.row_1x32, rounding=Rounding.nearest_even)
FP8 = OperandSpec(
    format=Format.fp8_e4m3, block=Block.none, rounding=Rounding.nearest_even, global_scale=GlobalScale.tensor
)
NVFP4, TRANSFORMED = operand_spec(), operand_spec(hadamard=HadamardSigns.fixed)
PAIRS = {
    "x of nvfp4": (NVFP4, TRANSFORMED),
    "dy of nvfp4": (
        replace(NVFP4, rounding=Rounding.stochastic),
        replace(TRANSFORMED, rounding=Rounding.stochastic),
    ),
    "without transform": (NVFP4, NVFP4),
    "wide transform": (NVFP4, replace(TRANSFORMED, hadamard_size=64)),
    "tiles": (operand_spec(block=Block.tile_16x16), operand_spec(block=Block.tile_16x16)),
    "mxfp4": (MXFP4, replace(MXFP4, rounding=Rounding.stochastic)),
    "fp8": (FP8, FP8),
    "mixed": (FP8, replace(NVFP4, rounding=Rounding.stochastic)),
    "rows": (operand_spec(global_scale=GlobalScale.row), NVFP4),
}


def cells(name: str) -> tuple[Cell, Cell]:
    first, second = PAIRS[name]
    streams = [
        RandomStream(3, row_offset=64, column_offset=128, row_segment=16, row_stride=48),
        RandomStream(4, row_offset=64, column_offset=128, column_segment=16, column_stride=48),
    ]
    return (
        Cell(spec=first, direction=Direction.row, stream=streams[0]),
        Cell(spec=second, direction=Direction.column, stream=streams[1]),
    )


def check(x: Tensor, name: str) -> None:
    row, column = cells(name)
    amaxes = compute_amax_both(x, row, column)
    results = quantize_both(x, row, column, amax=amaxes)
    for cell, amax, result in zip((row, column), amaxes, results, strict=True):
        assert same_bits(amax, compute_amax(x, cell.spec, direction=cell.direction))
        expected = quantize(x, cell.spec, direction=cell.direction, stream=cell.stream)
        assert same_bits(result.codes, expected.codes)
        assert same_bits(result.block_scale, expected.block_scale)
        assert (result.shape, result.dtype, result.spec) == (expected.shape, expected.dtype, expected.spec)


def has_whole_groups(name: str, num_rows: int) -> bool:
    """Whether the transform of a pair, along the rows, finds no group cut short."""
    return not ("transform" in name and num_rows % 64) and not ("nvfp4" in name and num_rows % 16)


SHAPES = [(64, 64), (320, 576), (64, 48), (40, 24)]
CASES = [(name, shape) for shape in SHAPES for name in PAIRS if has_whole_groups(name, shape[0])]


@pytest.mark.parametrize(("name", "shape"), CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_one_pass_equals_two(name: str, shape: tuple[int, int], dtype: torch.dtype):
    check(filled(*shape, dtype=dtype, fill="wide", seed=0), name)


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("name", ["x of nvfp4", "dy of nvfp4", "mxfp4"])
def test_special_values(name: str, fill: str):
    check(filled(64, 128, dtype=torch.bfloat16, fill=fill, seed=1), name)


def test_the_oracle_does_two_passes_and_agrees():
    x = filled(64, 64, dtype=torch.bfloat16, fill="normal", seed=0)
    row, column = cells("dy of nvfp4")
    fast = quantize_both(x, row, column, amax=compute_amax_both(x, row, column))
    with use("oracle"):
        slow = quantize_both(x, row, column, amax=compute_amax_both(x, row, column))
    assert all(same_bits(a.codes, b.codes) for a, b in zip(fast, slow, strict=True))


def test_the_published_recipe_takes_one_pass():
    x = torch.ones(64, 64, dtype=torch.bfloat16)
    for name in ("x of nvfp4", "dy of nvfp4", "mxfp4", "fp8"):
        row, column = cells(name)
        assert native.fits_one_pass(x, row.settings(), column.settings())
    row, column = cells("rows")
    assert is_compiled(x)
    assert not native.fits_one_pass(x, row.settings(), column.settings())
    assert not native.fits_one_pass(x[:, :40], *(cell.settings() for cell in cells("x of nvfp4")))


def test_stochastic_rounding_without_a_stream_is_an_error():
    x = torch.ones(64, 64, dtype=torch.bfloat16)
    row, column = (replace(cell, stream=None) for cell in cells("dy of nvfp4"))
    with pytest.raises(ValueError, match="needs a stream"):
        quantize_both(x, row, column, amax=(torch.ones(1), torch.ones(1)))
