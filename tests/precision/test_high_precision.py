"""Evaluation without rounding."""

import copy

import pytest
import torch

from nvfp4_train.config.recipe import ComputeDtype
from nvfp4_train.precision.apply import apply_precision
from nvfp4_train.precision.high_precision import high_precision
from tests.support.blocks import TinyBlocks
from tests.support.recipes import cast_recipe, nvfp4_recipe

TOKENS = torch.arange(32).view(2, 16)


def test_it_is_the_bf16_recipe_bit_for_bit_and_ends_with_the_context():
    model, twin = TinyBlocks(), TinyBlocks()
    plan = apply_precision(model, nvfp4_recipe(), seed=0)
    apply_precision(twin, cast_recipe(ComputeDtype.bf16), seed=0)
    rounded = model(TOKENS)
    with high_precision(plan.position):
        unrounded = model(TOKENS)
    assert torch.equal(unrounded, twin(TOKENS))
    assert not torch.equal(unrounded, rounded)
    assert torch.equal(model(TOKENS), rounded)


def test_gradients_are_those_of_the_bf16_recipe():
    model, twin = TinyBlocks(), TinyBlocks()
    plan = apply_precision(model, nvfp4_recipe(), seed=0)
    apply_precision(twin, cast_recipe(ComputeDtype.bf16), seed=0)
    with high_precision(plan.position):
        model(TOKENS).float().square().sum().backward()
    twin(TOKENS).float().square().sum().backward()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


def test_blocks_do_not_limit_the_tokens_in_it():
    model = TinyBlocks()
    plan = apply_precision(model, nvfp4_recipe(), seed=0)
    with high_precision(plan.position):
        assert model(TOKENS[:, :5]).shape == (2, 5, 48)


def test_the_fp32_recipe_stays_in_fp32():
    model = TinyBlocks()
    plan = apply_precision(model, cast_recipe(ComputeDtype.fp32), seed=0)
    outside = model(TOKENS)
    with high_precision(plan.position):
        inside = model(TOKENS)
    assert inside.dtype is torch.float32
    assert torch.equal(inside, outside)


def test_it_nests_and_ends_after_an_error():
    model = TinyBlocks()
    position = apply_precision(model, nvfp4_recipe(), seed=0).position
    before = copy.copy(position)
    with high_precision(position):
        with pytest.raises(ZeroDivisionError), high_precision(position):
            1 / 0  # noqa: B018
        assert position.high_precision
    assert position == before
