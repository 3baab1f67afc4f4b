import pytest

from nvfp4_train.numerics.spec import Block, Format, GlobalScale, HadamardSigns, OperandSpec, Rounding, ScaleRule

NVFP4 = {
    "format": Format.nvfp4,
    "block": Block.row_1x16,
    "rounding": Rounding.nearest_even,
    "global_scale": GlobalScale.tensor,
}
MXFP4 = {"format": Format.mxfp4, "block": Block.row_1x32, "rounding": Rounding.nearest_even}
FP8 = {
    "format": Format.fp8_e4m3,
    "block": Block.none,
    "rounding": Rounding.nearest_even,
    "global_scale": GlobalScale.tensor,
}
BF16 = {"format": Format.bf16, "block": Block.none, "rounding": Rounding.nearest_even}


@pytest.mark.parametrize(
    "fields",
    [
        BF16,
        NVFP4,
        NVFP4 | {"block": Block.tile_16x16},
        NVFP4 | {"hadamard_size": 16, "hadamard_signs": HadamardSigns.fixed, "rounding": Rounding.stochastic},
        NVFP4 | {"hadamard_size": 16},
        NVFP4 | {"global_scale": GlobalScale.row},
        NVFP4 | {"scale_rule": ScaleRule.four_over_six_mse, "block_scale_max": 256},
        NVFP4 | {"scale_rule": ScaleRule.clip_safe, "rounding": Rounding.stochastic, "hadamard_size": 128},
        NVFP4 | {"global_scale": GlobalScale.block_128, "hadamard_size": 2, "hadamard_signs": HadamardSigns.per_call},
        MXFP4,
        MXFP4 | {"block": Block.tile_32x32, "scale_rule": ScaleRule.floor},
        MXFP4 | {"format": Format.mxfp8_e5m2, "rounding": Rounding.stochastic},
        FP8,
        FP8 | {"format": Format.fp8_e5m2, "amax_history_length": 16},
        FP8 | {"global_scale": GlobalScale.row},
        FP8 | {"block": Block.tile_128x128, "global_scale": GlobalScale.none},
    ],
)
def test_defined_combinations_are_accepted(fields: dict[str, object]):
    assert OperandSpec(**fields).is_quantized is (fields["format"] is not Format.bf16)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (BF16 | {"block": Block.row_1x16}, "block: found row_1x16, a bf16 operand has only none"),
        (BF16 | {"rounding": Rounding.stochastic}, "rounding: found stochastic"),
        (BF16 | {"hadamard_size": 16}, "hadamard_size: found 16"),
        (BF16 | {"hadamard_signs": HadamardSigns.fixed}, "hadamard_signs: found fixed, a bf16 operand has only none"),
        (BF16 | {"block_scale_max": 256}, "block_scale_max: found 256, a bf16 operand has only 448"),
        (NVFP4 | {"block": Block.none}, "block: found none"),
        (NVFP4 | {"global_scale": GlobalScale.none}, "global_scale: found none"),
        (NVFP4 | {"hadamard_size": 24}, "hadamard_size: found 24, expected 0"),
        (NVFP4 | {"block": Block.row_1x32}, "block: found row_1x32, nvfp4 needs one of row_1x16, tile_16x16"),
        (NVFP4 | {"scale_rule": ScaleRule.floor}, "scale_rule: found floor, nvfp4 has"),
        (NVFP4 | {"amax_history_length": 4}, "amax_history_length: works with fp8 formats"),
        (MXFP4 | {"block": Block.row_1x16}, "block: found row_1x16, mxfp4 needs one of row_1x32, tile_32x32"),
        (MXFP4 | {"global_scale": GlobalScale.tensor}, "global_scale: found tensor, mxfp4 has none"),
        (MXFP4 | {"scale_rule": ScaleRule.clip_safe}, "scale_rule: found clip_safe, mxfp4 has amax, floor"),
        (FP8 | {"global_scale": GlobalScale.none}, "global_scale: found none, fp8_e4m3 needs tensor or row"),
        (FP8 | {"block": Block.row_1x128}, "global_scale: found tensor, fp8_e4m3 with block row_1x128 has none"),
        (FP8 | {"global_scale": GlobalScale.block_128}, "global_scale: found block_128, fp8_e4m3 needs tensor or row"),
        (
            FP8 | {"global_scale": GlobalScale.row, "amax_history_length": 4},
            "works with fp8 formats and global_scale tensor",
        ),
        (FP8 | {"amax_history_length": -1}, "amax_history_length: found -1"),
        (BF16 | {"amax_history_length": 4}, "amax_history_length: found 4, a bf16 operand has only 0"),
        (NVFP4 | {"hadamard_signs": HadamardSigns.fixed}, "without a transform"),
        (NVFP4 | {"block_scale_max": 300}, "block_scale_max: found 300"),
        (NVFP4 | {"block_scale_max": 256}, "belongs to the four-over-six"),
        (NVFP4 | {"global_scale": GlobalScale.row, "rounding": Rounding.stochastic}, "global_scale: row works with"),
        (NVFP4 | {"scale_rule": ScaleRule.four_over_six_mae, "hadamard_size": 16}, "needs rounding nearest_even"),
    ],
)
def test_undefined_combinations_are_refused_with_the_reason(fields: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        OperandSpec(**fields)


def test_all_problems_are_named_at_once():
    with pytest.raises(ValueError, match=r"block: .*; global_scale: .*; hadamard_size: "):
        OperandSpec(**NVFP4 | {"block": Block.none, "global_scale": GlobalScale.none, "hadamard_size": 3})


@pytest.mark.parametrize(
    ("fields", "block_size", "fp32_scale", "is_packed", "is_direction_free"),
    [
        (NVFP4, 16, GlobalScale.tensor, True, False),
        (NVFP4 | {"block": Block.tile_16x16}, 16, GlobalScale.tensor, True, True),
        (NVFP4 | {"block": Block.tile_16x16, "rounding": Rounding.stochastic}, 16, GlobalScale.tensor, True, False),
        (NVFP4 | {"block": Block.tile_16x16, "hadamard_size": 16}, 16, GlobalScale.tensor, True, False),
        (MXFP4, 32, GlobalScale.none, True, False),
        (MXFP4 | {"format": Format.mxfp8_e4m3, "block": Block.tile_32x32}, 32, GlobalScale.none, False, True),
        (FP8, 0, GlobalScale.tensor, False, True),
        (FP8 | {"global_scale": GlobalScale.row}, 0, GlobalScale.row, False, False),
        (FP8 | {"block": Block.row_1x128, "global_scale": GlobalScale.none}, 0, GlobalScale.block_128, False, False),
        (FP8 | {"block": Block.tile_128x128, "global_scale": GlobalScale.none}, 0, GlobalScale.block_128, False, True),
        (BF16, 0, GlobalScale.none, False, True),
    ],
)
def test_what_follows_from_a_spec(fields, block_size, fp32_scale, is_packed, is_direction_free):
    spec = OperandSpec(**fields)
    assert (spec.block_size, spec.fp32_scale, spec.is_packed) == (block_size, fp32_scale, is_packed)
    assert spec.is_direction_free is is_direction_free
    assert spec.has_amax is (fp32_scale is not GlobalScale.none)
