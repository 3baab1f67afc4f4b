"""Rounding of single operands: which random bytes they draw, how shards agree, and what is stored."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nvfp4_train.config.recipe import LinearRecipe
from nvfp4_train.numerics.quantize import Direction, quantize
from nvfp4_train.numerics.random import RandomStream, stream_key
from nvfp4_train.numerics.spec import Block, Format, GlobalScale, HadamardSigns, OperandSpec, Rounding
from nvfp4_train.precision.operands import OPERAND_PLACES, OperandRounder
from tests.support.recipes import cast_table, nvfp4_table

TOKENS, FEATURES = 64, 48
STOCHASTIC = OperandSpec(
    format=Format.nvfp4, block=Block.row_1x16, rounding=Rounding.stochastic, global_scale=GlobalScale.tensor
)


def make_rounder(
    recipe: LinearRecipe | None = None,
    *,
    tokens: int = 0,
    inputs: int = 0,
    outputs: int = 0,
    step: int = 5,
    amax: Tensor | None = None,
    segment: int = 0,
    stride: int = 0,
    specs: dict[str, OperandSpec] | None = None,
) -> OperandRounder:
    """A rounder whose ranks agree on `amax`, if it is given."""
    return OperandRounder(
        layer="proj",
        specs=specs or (recipe or nvfp4_table()).operands,
        seed=11,
        step=step,
        offsets={"tokens": tokens, "inputs": inputs, "outputs": outputs},
        reduce_amax=lambda _, own: own if amax is None else torch.maximum(own, amax),
        record=lambda name, value: None,
        token_segment=segment,
        token_stride=stride,
    )


def make_gradient() -> Tensor:
    return torch.randn(TOKENS, FEATURES, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)


@pytest.mark.parametrize("recipe", [nvfp4_table(), cast_table(Format.bf16), cast_table(Format.fp32)])
@pytest.mark.parametrize("name", list(OPERAND_PLACES))
def test_a_stored_operand_is_the_rounded_one(recipe, name):
    rounder, tensor = make_rounder(recipe), make_gradient()
    rounded, stored = rounder.round(name, tensor), rounder.store(name, tensor).to_gemm_operand()
    assert torch.equal(rounded.values, stored.values)
    assert (rounded.amax is None and stored.amax is None) or torch.equal(rounded.amax, stored.amax)
    contracts_rows = OPERAND_PLACES[name].direction is Direction.column
    assert rounded.values.shape == ((FEATURES, TOKENS) if contracts_rows else (TOKENS, FEATURES))


def test_a_transposed_tile_is_the_quantization_of_the_transposed_weight():
    rounder, weight = make_rounder(), make_gradient()
    stored = rounder.store("fprop.w", weight)
    other = rounder.store("dgrad.w", weight).to_gemm_operand()
    assert torch.equal(stored.transposed().to_gemm_operand().values, other.values)
    assert torch.equal(
        stored.transposed().transposed().to_gemm_operand().values, rounder.round("fprop.w", weight).values
    )


def test_the_bytes_come_from_the_stream_that_the_names_and_offsets_say():
    dy = make_gradient()
    rounder = make_rounder(tokens=320, outputs=96)
    key = stream_key(seed=11, layer="proj", operand="dgrad.dy", step=5)
    expected = quantize(
        dy,
        rounder.specs["dgrad.dy"],
        direction=Direction.row,
        stream=RandomStream(key, row_offset=320, column_offset=96),
    )
    assert torch.equal(rounder.store("dgrad.dy", dy).tensors[0], expected.codes)


@pytest.mark.parametrize("name", ["dgrad.dy", "wgrad.dy"])
def test_two_halves_of_a_batch_round_as_the_whole_does(name):
    dy, half = make_gradient(), TOKENS // 2
    whole = make_rounder(tokens=128).round(name, dy)
    parts = [
        make_rounder(tokens=128 + start, amax=whole.amax).round(name, dy[start : start + half]) for start in (0, half)
    ]
    token_dim = 0 if name == "dgrad.dy" else 1
    assert torch.equal(torch.cat([part.values for part in parts], dim=token_dim), whole.values)
    unmoved = make_rounder(tokens=128, amax=whole.amax).round(name, dy[half:])
    assert not torch.equal(unmoved.values, parts[1].values)


@pytest.mark.parametrize("name", ["dgrad.dy", "wgrad.dy"])
def test_slices_of_sequences_round_as_the_whole_does(name):
    """Two sequences of 32 tokens, of which each of two ranks holds a half."""
    dy, half = make_gradient(), TOKENS // 4
    whole = make_rounder(tokens=128).round(name, dy)
    sequences = dy.view(2, 2 * half, FEATURES)
    parts = [
        make_rounder(tokens=128 + start, segment=half, stride=2 * half, amax=whole.amax)
        .round(name, sequences[:, start : start + half].reshape(-1, FEATURES))
        .values.movedim(0 if name == "dgrad.dy" else 1, 0)
        .unflatten(0, (2, half))
        for start in (0, half)
    ]
    values = whole.values if name == "dgrad.dy" else whole.values.t()
    assert torch.equal(torch.cat(parts, dim=1).flatten(0, 1), values)


@pytest.mark.parametrize("name", ["fprop.x", "wgrad.x", "dgrad.w"])
def test_only_tokens_come_in_segments(name):
    stream = make_rounder(specs={name: STOCHASTIC}, tokens=16, segment=16, stride=64).stream(name)
    rows, columns = (stream.row_segment, stream.row_stride), (stream.column_segment, stream.column_stride)
    assert rows == ((16, 64) if name == "fprop.x" else (0, 0))
    assert columns == ((16, 64) if name == "wgrad.x" else (0, 0))


def test_slices_of_the_same_sequences_draw_the_same_signs():
    specs = {"wgrad.x": replace(STOCHASTIC, hadamard_size=16, hadamard_signs=HadamardSigns.per_call)}
    masks = [make_rounder(specs=specs, tokens=128).sign_mask("wgrad.x")]
    masks += [
        make_rounder(specs=specs, tokens=128 + start, segment=16, stride=32).sign_mask("wgrad.x") for start in (0, 16)
    ]
    assert len(set(masks)) == 1
    assert make_rounder(specs=specs, tokens=192).sign_mask("wgrad.x") != masks[0]


@pytest.mark.parametrize("name", ["dgrad.dy", "wgrad.dy"])
def test_shards_of_the_output_features_round_as_the_whole_does(name):
    dy, cut = make_gradient(), 16
    whole = make_rounder().round(name, dy)
    parts = [
        make_rounder(outputs=start, amax=whole.amax).round(name, dy[:, start:stop])
        for start, stop in ((0, cut), (cut, FEATURES))
    ]
    feature_dim = 1 if name == "dgrad.dy" else 0
    assert torch.equal(torch.cat([part.values for part in parts], dim=feature_dim), whole.values)


@pytest.mark.parametrize(
    ("name", "offsets"),
    [
        ("fprop.x", (1, 2)),
        ("fprop.w", (3, 2)),
        ("dgrad.dy", (1, 3)),
        ("dgrad.w", (2, 3)),
        ("wgrad.x", (2, 1)),
        ("wgrad.dy", (3, 1)),
    ],
)
def test_rows_and_columns_of_every_operand_start_where_its_shard_does(name, offsets):
    rounder = make_rounder(specs={name: STOCHASTIC}, tokens=4, inputs=8, outputs=12)
    stream = rounder.stream(name)
    assert (stream.row_offset, stream.column_offset) == tuple(4 * offset for offset in offsets)


def test_operands_and_steps_draw_different_bytes():
    dy = make_gradient()
    assert make_rounder().stream("dgrad.dy").key != make_rounder().stream("wgrad.dy").key
    first, second = (make_rounder(step=step).round("dgrad.dy", dy).values for step in (5, 6))
    assert not torch.equal(first, second)


def test_operands_that_need_no_bytes_have_no_stream():
    assert make_rounder().stream("fprop.x") is None
    assert make_rounder(cast_table(Format.bf16)).stream("wgrad.dy") is None
