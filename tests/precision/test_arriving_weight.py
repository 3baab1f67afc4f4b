"""A Linear whose weight arrives as codes computes what it computes with the weight itself."""

import torch
from torch import Tensor, nn

from nvfp4_train.numerics.quantize import Direction, compute_amax, quantize
from nvfp4_train.precision.apply import apply_precision
from nvfp4_train.precision.arriving_weight import ArrivingWeight
from nvfp4_train.precision.high_precision import high_precision
from nvfp4_train.precision.linear import QuantizedLinear
from nvfp4_train.precision.operands import StoredOperand
from tests.support.recipes import nvfp4_recipe


def build() -> tuple[nn.Module, QuantizedLinear, object]:
    torch.manual_seed(0)
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Linear(32, 48, bias=False)])
    plan = apply_precision(model, nvfp4_recipe(), seed=0)
    return model, model.blocks[0], plan.position


def arriving(linear: QuantizedLinear, weight: Tensor) -> ArrivingWeight:
    spec = linear.precision.recipe.operands["fprop.w"]

    def operand() -> StoredOperand:
        amax = compute_amax(weight, spec, direction=Direction.row)
        return StoredOperand.of_codes(quantize(weight, spec, direction=Direction.row, amax=amax), Direction.row)

    return ArrivingWeight(operand=operand, whole=lambda: weight)


def results(linear: QuantizedLinear, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    linear.weight.grad = None
    y = linear(x)
    y.backward(torch.ones_like(y))
    return [y.detach(), x.grad, linear.weight.grad]


def test_forward_and_gradients_are_the_same_and_need_no_values():
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    _, linear, position = build()
    expected = results(linear, x)
    with torch.no_grad(), high_precision(position):
        expected.append(linear(x))
    weight = linear.weight.detach().to(torch.bfloat16)
    linear.receive_weight(arriving(linear, weight))
    with torch.no_grad():
        linear.weight.fill_(torch.nan)
    found = results(linear, x)
    with torch.no_grad(), high_precision(position):
        found.append(linear(x))
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert torch.equal(linear.amax["fprop.w"], weight.abs().max().float().reshape(1))
