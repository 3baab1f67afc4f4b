import pytest

from nvfp4_train.numerics.spec import Block, Format, GlobalScale, HadamardSigns, OperandSpec, Rounding, ScaleRule

NVFP4 = {
    "format": Format.nvfp4,
    "block": Block.row_1x16,
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
    ],
)
def test_defined_combinations_are_accepted(fields: dict[str, object]):
    assert OperandSpec(**fields).is_quantized is (fields["format"] is Format.nvfp4)


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
        (NVFP4 | {"hadamard_size": 8}, "hadamard_size: found 8, expected 0"),
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
