from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from nvfp4_train.config.recipe import DgradRow, FpropRow, LinearRecipe, WgradRow
from nvfp4_train.numerics.spec import Format, OperandSpec
from nvfp4_train.precision.amax_history import AmaxHistory, end_step, named_histories
from nvfp4_train.precision.apply import apply_precision
from nvfp4_train.precision.linear import QuantizedLinear
from tests.support.recipes import nvfp4_recipe
from tests.support.tensors import format_spec

LENGTH = 3
QUANTIZED = ("fprop.x", "fprop.w", "dgrad.dy", "wgrad.x", "wgrad.dy")  # dgrad.w is fprop.w, transposed


def delayed(format: Format = Format.fp8_e4m3) -> OperandSpec:
    return replace(format_spec(format), amax_history_length=LENGTH)


def delayed_model(num_linears: int = 1) -> nn.Module:
    spec, gradient = delayed(), delayed(Format.fp8_e5m2)
    table = LinearRecipe(
        fprop=FpropRow(x=spec, w=spec), dgrad=DgradRow(dy=gradient, w=spec), wgrad=WgradRow(x=spec, dy=gradient)
    )
    torch.manual_seed(0)
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(num_linears))
    apply_precision(model, nvfp4_recipe(table), seed=0)
    return model


def step(model: nn.Module, *inputs: Tensor, largest=lambda maxima: maxima) -> Tensor:
    """One optimizer step of one microbatch per input; returns the last output."""
    for x in inputs:
        y = model.blocks[0](x.clone().requires_grad_())
        y.backward(torch.full_like(y, 0.5))
    end_step(model, largest_over_ranks=largest)
    return y


def history(model: nn.Module, name: str) -> list[float]:
    return model.blocks[0].amax_history.tensors[name].tolist()


def test_a_step_enters_when_it_is_over_and_the_oldest_leaves():
    model = delayed_model()
    for size in (1.0, 4.0, 2.0, 0.5):
        step(model, torch.full((16, 32), size))
    assert history(model, "fprop.x") == [0.5, 2.0, 4.0]
    assert history(model, "dgrad.dy") == [0.5, 0.5, 0.5]
    assert set(model.blocks[0].amax_history.tensors) == set(QUANTIZED)


def test_all_microbatches_of_a_step_are_scaled_alike_and_their_maximum_counts():
    model = delayed_model()
    step(model, torch.full((16, 32), 2.0))
    saturated = step(model, torch.full((16, 32), 8.0), torch.full((16, 32), 8.0), torch.ones(16, 32))
    assert saturated.isfinite().all()
    assert history(model, "fprop.x") == [8.0, 2.0, 0.0]


def test_what_exceeds_the_history_saturates_and_before_there_is_one_nothing_does():
    model = delayed_model()
    first = model.blocks[0](torch.full((16, 32), 2.0))
    step(model, torch.full((16, 32), 2.0))
    assert torch.equal(model.blocks[0](torch.full((16, 32), 8.0)), first)


def test_evaluation_leaves_no_trace():
    model = delayed_model()
    step(model, torch.ones(16, 32))
    with torch.no_grad():
        model.blocks[0](torch.full((16, 32), 100.0))
    step(model, torch.full((16, 32), 2.0))
    assert history(model, "fprop.x") == [2.0, 1.0, 0.0]


def test_a_weight_that_an_evaluation_quantized_belongs_to_the_next_step():
    histories = []
    for evaluates in (False, True):
        model = delayed_model()
        with torch.no_grad():
            if evaluates:
                model.blocks[0](torch.ones(16, 32))
        step(model, torch.ones(16, 32))
        histories.append(history(model, "fprop.w"))
    assert histories[0] == histories[1]
    assert histories[0][0] > 0


def test_without_a_history_nothing_is_reduced():
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Linear(32, 32, bias=False)])
    apply_precision(model, nvfp4_recipe(), seed=0)
    model.blocks[0](torch.ones(16, 32))
    end_step(model, largest_over_ranks=lambda maxima: pytest.fail("nothing was recorded"))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_scales_no_other(value: float):
    model = delayed_model()
    step(model, torch.full((16, 32), 3.0))
    y = step(model, torch.full((16, 32), value))
    assert not y.isfinite().any()
    assert history(model, "fprop.x") == [0.0, 3.0, 0.0]


def test_ranks_agree_with_one_reduction():
    model = delayed_model(num_linears=2)
    calls = []

    def largest(maxima: Tensor) -> Tensor:
        calls.append(maxima)
        return maxima * 2

    step(model, torch.ones(16, 32), largest=largest)
    assert [len(maxima) for maxima in calls] == [2 * len(QUANTIZED)]  # of the Linear that saw no tokens too
    assert history(model, "fprop.x") == [2.0, 0.0, 0.0]


def test_the_names_in_a_checkpoint_and_the_tensors_behind_them():
    model = delayed_model()
    named = named_histories(model)
    assert sorted(named) == sorted(f"blocks.0.amax_history.{name.replace('.', '_')}" for name in QUANTIZED)
    named["blocks.0.amax_history.fprop_x"].fill_(7.0)
    assert history(model, "fprop.x") == [7.0] * LENGTH


def test_other_recipes_have_no_history():
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Linear(32, 32, bias=False)])
    apply_precision(model, nvfp4_recipe(), seed=0)
    assert isinstance(model.blocks[0], QuantizedLinear)
    assert named_histories(model) == {}


def test_the_history_scales_once_there_is_one():
    own = torch.tensor([5.0])
    empty = AmaxHistory({"fprop.x": 2})
    assert empty.scale_by("fprop.x", own).tolist() == [5.0]
    empty.advance("fprop.x", torch.tensor([2.0]))
    assert empty.scale_by("fprop.x", own).tolist() == [2.0]
