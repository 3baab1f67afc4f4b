"""When a quantized weight is kept and when it is made again."""

import pytest
import torch
from torch import nn

from nvfp4_train.config.recipe import LinearRecipe
from nvfp4_train.numerics.spec import Block, Format, GlobalScale, OperandSpec, Rounding
from nvfp4_train.precision.operands import OperandRounder
from nvfp4_train.precision.weight_cache import WeightCache, is_shared
from tests.support.recipes import cast_table, nvfp4_table


def make_rounder(recipe: LinearRecipe | None = None, *, step: int = 0, w: OperandSpec | None = None) -> OperandRounder:
    specs = (recipe or nvfp4_table()).operands
    return OperandRounder(
        layer="proj",
        specs=specs if w is None else specs | {"fprop.w": w, "dgrad.w": w},
        seed=0,
        step=step,
        offsets={"tokens": 0, "inputs": 0, "outputs": 0},
        reduce_amax=lambda _, amax: amax,
        record=lambda name, amax: None,
    )


def make_weight() -> nn.Parameter:
    return nn.Parameter(torch.randn(32, 48, generator=torch.Generator().manual_seed(0)))


def is_kept(cache: WeightCache, weight: nn.Parameter, *, rounder: OperandRounder, version: int = 0) -> bool:
    """Whether the next use gives the tensors of the last one."""
    before = {name: entry[2].tensors[0] for name, entry in cache._entries.items()}
    operand = cache.operand("fprop.w", weight, rounder=rounder, version=version)
    return before.get("fprop.w") is operand.tensors[0]


def filled() -> tuple[WeightCache, nn.Parameter, OperandRounder]:
    cache, weight, rounder = WeightCache(), make_weight(), make_rounder()
    cache.operand("fprop.w", weight, rounder=rounder, version=0)
    return cache, weight, rounder


def test_it_is_kept_over_microbatches_and_steps_without_an_update():
    cache, weight, rounder = filled()
    assert is_kept(cache, weight, rounder=rounder)
    assert is_kept(cache, weight, rounder=make_rounder(step=1))


def test_it_is_made_again_after_the_counter_moved():
    cache, weight, rounder = filled()
    assert not is_kept(cache, weight, rounder=rounder, version=1)


def test_it_is_made_again_after_an_update_in_place():
    cache, weight, rounder = filled()
    with torch.no_grad():
        weight.add_(1)
    assert not is_kept(cache, weight, rounder=rounder)


def test_it_is_made_again_for_another_parameter_with_the_same_values():
    cache, weight, rounder = filled()
    assert not is_kept(cache, nn.Parameter(weight.detach()), rounder=rounder)


def test_it_is_made_again_under_another_spec():
    cache, weight, _ = filled()
    assert not is_kept(cache, weight, rounder=make_rounder(nvfp4_table(weight_block=Block.row_1x16)))


def test_it_is_made_again_after_clear():
    cache, weight, rounder = filled()
    cache.clear()
    assert not is_kept(cache, weight, rounder=rounder)


def test_a_stochastic_weight_is_drawn_anew_each_step():
    stochastic = OperandSpec(
        format=Format.nvfp4, block=Block.row_1x16, rounding=Rounding.stochastic, global_scale=GlobalScale.tensor
    )
    cache, weight = WeightCache(), make_weight()
    cache.operand("fprop.w", weight, rounder=make_rounder(w=stochastic), version=0)
    assert is_kept(cache, weight, rounder=make_rounder(w=stochastic))
    assert not is_kept(cache, weight, rounder=make_rounder(w=stochastic, step=1))


def test_tiles_are_quantized_once_for_fprop_and_dgrad():
    cache, weight, rounder = filled()
    fprop = cache.operand("fprop.w", weight, rounder=rounder, version=0)
    dgrad = cache.operand("dgrad.w", weight, rounder=rounder, version=0)
    assert dgrad.tensors[0] is fprop.tensors[0]
    assert torch.equal(dgrad.to_gemm_operand().values, fprop.to_gemm_operand().values.t())


def test_rows_are_quantized_along_each_contracted_dim():
    cache, weight, rounder = WeightCache(), make_weight(), make_rounder(nvfp4_table(weight_block=Block.row_1x16))
    fprop = cache.operand("fprop.w", weight, rounder=rounder, version=0)
    dgrad = cache.operand("dgrad.w", weight, rounder=rounder, version=0)
    assert fprop.shape == (32, 48)
    assert dgrad.shape == (48, 32)
    assert not torch.equal(dgrad.to_gemm_operand().values, fprop.to_gemm_operand().values.t())


@pytest.mark.parametrize("name", ["fprop.w", "dgrad.w"])
def test_a_weight_in_high_precision_is_the_parameter_itself_and_not_kept(name):
    cache, weight = WeightCache(), make_weight()
    operand = cache.operand(name, weight, rounder=make_rounder(cast_table(Format.bf16)), version=0)
    assert operand.tensors[0] is weight
    assert not cache._entries


def test_what_is_quantized_is_the_bf16_cast():
    cache, weight, rounder = filled()
    rounded = nn.Parameter(weight.detach().to(torch.bfloat16))
    assert not torch.equal(rounded.float(), weight)
    a = cache.operand("fprop.w", weight, rounder=rounder, version=0)
    b = WeightCache().operand("fprop.w", rounded, rounder=rounder, version=0)
    assert all(torch.equal(x, y) for x, y in zip(a.tensors, b.tensors, strict=True))


def test_sharing_needs_tiles_and_equal_specs():
    assert is_shared(nvfp4_table().operands)
    assert not is_shared(nvfp4_table(weight_block=Block.row_1x16).operands)
    assert not is_shared(cast_table(Format.bf16).operands)
    mixed = nvfp4_table().operands | {"dgrad.w": cast_table(Format.bf16).dgrad.w}
    assert not is_shared(mixed)
