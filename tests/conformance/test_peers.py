"""The same tensors through independent programs, where they are installed."""

import warnings

import pytest
import torch
from torch import Tensor

from nvfp4_train.numerics.formats import unpack_codes
from nvfp4_train.numerics.quantize import Direction, dequantize, quantize
from nvfp4_train.numerics.spec import Block, Format, GlobalScale, ScaleRule
from tests.support.tensors import filled, format_spec, operand_spec

pytestmark = pytest.mark.peer
FILLS = ("normal", "wide", "sparse", "ties")


@pytest.fixture(autouse=True)
def _quiet():
    """Importing them warns about kernels for GPUs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def same_numbers(got: Tensor, expected: Tensor) -> bool:
    """Equal as numbers: -0 is 0."""
    return torch.equal(got.float() + 0.0, expected.float() + 0.0)


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("format", [Format.mxfp4, Format.mxfp8_e4m3, Format.mxfp8_e5m2])
@pytest.mark.parametrize("rule", [ScaleRule.amax, ScaleRule.floor])
def test_torchao_mx(fill: str, format: Format, rule: ScaleRule):
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    config = pytest.importorskip("torchao.prototype.mx_formats.config")
    elements = {
        Format.mxfp4: torch.float4_e2m1fn_x2,
        Format.mxfp8_e4m3: torch.float8_e4m3fn,
        Format.mxfp8_e5m2: torch.float8_e5m2,
    }
    x = filled(32, 128, dtype=torch.bfloat16, fill=fill, seed=1)
    mode = config.ScaleCalculationMode.RCEIL if rule is ScaleRule.amax else config.ScaleCalculationMode.FLOOR
    scales, codes = mx.to_mx(x, elements[format], 32, mode)
    ours = quantize(x, format_spec(format, scale_rule=rule), direction=Direction.row)
    nonzero = x.unflatten(1, (-1, 32)).abs().amax(2) > 0
    assert torch.equal(ours.block_scale[nonzero], scales.view(torch.uint8).view_as(ours.block_scale)[nonzero])
    if format is Format.mxfp4:
        got, expected = unpack_codes(ours.codes), unpack_codes(codes.view(torch.uint8).view_as(ours.codes))
        assert torch.equal(torch.where(got == 8, 0, got), torch.where(expected == 8, 0, expected))
    else:
        assert torch.equal(ours.codes, codes.view(torch.uint8).view_as(ours.codes))


@pytest.mark.parametrize("fill", ["normal", "sparse"])
def test_torchao_nvfp4(fill: str):
    """It has no scale below 2^-6, and combines the factors in another order, which may move a tie."""
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    x = filled(64, 128, dtype=torch.bfloat16, fill=fill, seed=2)
    scales, codes = nvfp4.nvfp4_quantize(x, 16, nvfp4.per_tensor_amax_to_scale(x.abs().max()))
    ours = quantize(x, operand_spec(), direction=Direction.row)
    is_normal = ours.block_scale >= 8
    assert is_normal.float().mean() > 0.5
    bytes_apart = (ours.block_scale.int() - scales.view(torch.uint8).int())[is_normal].abs()
    assert bytes_apart.max() <= 1
    assert (bytes_apart == 0).float().mean() > 0.98
    pairs = [
        unpack_codes(found).unflatten(1, (-1, 16))[is_normal] % 8 for found in (ours.codes, codes.view(torch.uint8))
    ]
    assert (pairs[0] == pairs[1]).float().mean() > 0.98
    assert (pairs[0].int() - pairs[1].int()).abs().max() <= 1


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("format", [Format.fp8_e4m3, Format.fp8_e5m2])
@pytest.mark.parametrize("rows", [False, True])
def test_torchao_fp8(fill: str, format: Format, rows: bool):
    utils = pytest.importorskip("torchao.float8.float8_utils")
    config = pytest.importorskip("torchao.float8.config")
    dtype = {Format.fp8_e4m3: torch.float8_e4m3fn, Format.fp8_e5m2: torch.float8_e5m2}[format]
    x = filled(32, 96, dtype=torch.float32, fill=fill, seed=3)
    granularity = config.ScalingGranularity.AXISWISE if rows else config.ScalingGranularity.TENSORWISE
    how = {"scaling_granularity": granularity, "axiswise_dim": -1 if rows else None}
    scale = utils.tensor_to_scale(x, dtype, **how)
    expected = utils.to_fp8_saturated(x * scale, dtype)
    spec = format_spec(format, global_scale=GlobalScale.row if rows else GlobalScale.tensor)
    ours = quantize(x, spec, direction=Direction.row)
    assert torch.equal(ours.codes, expected.view(torch.uint8))
    torch.testing.assert_close(dequantize(ours), expected.float() / scale, rtol=1e-6, atol=0)


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("block", [Block.row_1x128, Block.tile_128x128])
def test_torchao_fp8_blocks(fill: str, block: Block):
    kernels = pytest.importorskip("torchao.prototype.blockwise_fp8_training.kernels", exc_type=ImportError)
    is_tile = block is Block.tile_128x128
    peer = kernels.torch_blockwise_scale_weight_quant if is_tile else kernels.torch_blockwise_scale_act_quant_lhs
    x = filled(256, 256, dtype=torch.bfloat16, fill=fill, seed=4)
    codes, _ = peer(x, 128)
    ours = quantize(x, format_spec(Format.fp8_e4m3, block=block), direction=Direction.row)
    assert torch.equal(ours.codes, codes.contiguous().view(torch.uint8))


@pytest.mark.parametrize("fill", ["normal", "ties", "sparse"])
def test_compressed_tensors_e2m1(fill: str):
    """Its packing of numbers that are on the grid, which is how checkpoints for inference store nvfp4."""
    peer = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    x = filled(16, 64, dtype=torch.bfloat16, fill=fill, seed=5)
    ours = quantize(x, operand_spec(), direction=Direction.row)
    values = peer.unpack_fp4_from_uint8(ours.codes, 16, 64, dtype=torch.float32)
    assert torch.equal(peer.pack_fp4_to_uint8(values), ours.codes)
    scale = ours.block_scale.view(torch.float8_e4m3fn).float() * (ours.amax / 2688)
    restored = values * scale.repeat_interleave(16, dim=1)
    assert same_numbers(restored.bfloat16(), dequantize(ours).bfloat16())
