"""Rows, pairs and quantizers from outside inside a QuantizedLinear."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nvfp4_train.config.recipe import LinearRecipe
from nvfp4_train.numerics.spec import Format, GemmMode
from nvfp4_train.precision.linear import LinearPrecision, QuantizedLinear
from nvfp4_train.precision.linear_rows import Saved
from nvfp4_train.precision.operands import OperandRounder
from nvfp4_train.precision.position import RoundingPosition
from tests.support.recipes import cast_table, nvfp4_table

OUTSIDE = "tests.support.outside"
TOKENS, INPUTS, OUTPUTS = 64, 96, 48


def make_linear(recipe: LinearRecipe) -> QuantizedLinear:
    precision = LinearPrecision(
        layer="proj",
        recipe_name="test",
        recipe=recipe,
        high_precision=cast_table(Format.bf16),
        gemm=GemmMode.auto,
    )
    torch.manual_seed(0)
    return QuantizedLinear(INPUTS, OUTPUTS, bias=True, precision=precision, position=RoundingPosition(seed=7, step=3))


def run(linear: QuantizedLinear) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, INPUTS, generator=generator).to(torch.bfloat16).requires_grad_()
    dy = torch.randn(TOKENS, OUTPUTS, generator=generator).to(torch.bfloat16)
    y = linear(x)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad, "dw": linear.weight.grad, "db": linear.bias.grad}


def with_rows(**paths: str) -> LinearRecipe:
    table = nvfp4_table()
    rows = {name: replace(getattr(table, name), gemm=f"{OUTSIDE}:{path}") for name, path in paths.items()}
    return replace(table, **rows)


@pytest.mark.parametrize("rows", [{"fprop": "fprop_row"}, {"dgrad": "dgrad_row"}, {"wgrad": "wgrad_row"}])
def test_a_row_from_outside_that_does_the_same_gives_the_same_bits(rows: dict[str, str]):
    built_in, outside = run(make_linear(nvfp4_table())), run(make_linear(with_rows(**rows)))
    for name in built_in:
        if name == "dx":  # the tile codes of w^T and the transposed codes of w are the same numbers, summed alike
            torch.testing.assert_close(outside[name], built_in[name], rtol=2**-7, atol=1e-6)
        else:
            assert torch.equal(outside[name], built_in[name])


def test_a_row_gets_its_arguments():
    recipe = with_rows(fprop="fprop_row")
    recipe = replace(recipe, fprop=replace(recipe.fprop, args={"times": 0.0}))
    linear = make_linear(recipe)
    assert torch.equal(run(linear)["y"], linear.bias.detach().to(torch.bfloat16).expand(TOKENS, OUTPUTS))


def test_a_pair_from_outside_replaces_the_table():
    pair = replace(nvfp4_table(), pair=f"{OUTSIDE}:Pair")
    outside, expected = run(make_linear(pair)), run(make_linear(cast_table(Format.bf16)))
    assert all(torch.equal(outside[name], expected[name]) for name in expected)


def test_a_pair_is_told_which_gradients_are_needed():
    linear = make_linear(replace(nvfp4_table(), pair=f"{OUTSIDE}:Pair"))
    linear.weight.requires_grad_(False)
    x = torch.ones(TOKENS, INPUTS, dtype=torch.bfloat16, requires_grad=True)
    linear(x).sum().backward()
    assert x.grad is not None
    assert linear.weight.grad is None


@pytest.mark.parametrize("name", ["fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.x", "wgrad.dy"])
def test_a_quantizer_from_outside_works_in_every_cell(name: str):
    table = nvfp4_table()
    row, cell = name.split(".")
    spec = replace(table.operands[name], quantizer=f"{OUTSIDE}:doubled", args={"times": 4.0})
    changed = replace(table, **{row: replace(getattr(table, row), **{cell: spec})})
    exact, outside = run(make_linear(cast_table(Format.bf16))), run(make_linear(changed))
    result = {"fprop": "y", "dgrad": "dx", "wgrad": "dw"}[row]
    bias = exact["db"] * 0 if result != "y" else make_linear(table).bias.detach().to(torch.bfloat16)
    shift = bias if result == "y" else 0.0
    ratio = ((outside[result] - shift) * (exact[result] - shift)).sum() / (exact[result] - shift).square().sum()
    assert 3.8 < ratio < 4.2  # four times the product, up to the other operand's rounding
    for other in {"y", "dx", "dw"} - {result}:
        assert torch.equal(outside[other], run(make_linear(table))[other])


def test_a_result_of_the_wrong_shape_names_its_path(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(f"{OUTSIDE}.fprop_row", lambda x, w, tools: x)
    with pytest.raises(ValueError, match=rf"{OUTSIDE}:fprop_row: expected a result of \(64, 48\), found \(64, 96\)"):
        run(make_linear(with_rows(fprop="fprop_row")))


def test_saved_operands_come_back_by_name():
    rounder = OperandRounder(
        layer="proj",
        specs=nvfp4_table().operands,
        seed=0,
        step=0,
        offsets={"tokens": 0, "inputs": 0, "outputs": 0},
        reduce_amax=lambda _, amax: amax,
        record=lambda name, amax: None,
    )
    x = torch.ones(32, 32, dtype=torch.bfloat16)
    operands = {"w": rounder.store("dgrad.w", x), "x": rounder.store("wgrad.x", 2 * x)}
    saved = Saved.of(**operands)
    back = saved.without_tensors().with_tensors(saved.tensors)
    for name, operand in operands.items():
        assert all(a is b for a, b in zip(back.operand(name).tensors, operand.tensors, strict=True))
