"""What quantized operands left behind, and with it the layer where a NaN appears first."""

import math

import torch

from nvfp4_train.precision.apply import apply_precision
from nvfp4_train.precision.coverage import PrecisionPlan
from nvfp4_train.precision.monitor import recorded_amax
from tests.support.blocks import TinyBlocks
from tests.support.recipes import nvfp4_recipe

TOKENS = torch.arange(32).view(2, 16)


def make_model() -> tuple[TinyBlocks, PrecisionPlan]:
    model = TinyBlocks()
    return model, apply_precision(model, nvfp4_recipe(), seed=0)


def first_non_finite(model: TinyBlocks) -> str | None:
    return next((name for name, amax in recorded_amax(model).items() if not amax.isfinite().all()), None)


def test_every_operand_of_a_step_is_recorded_in_the_order_of_computation():
    model, plan = make_model()
    assert recorded_amax(model) == {}
    model(TOKENS).float().sum().backward()
    names = list(recorded_amax(model))
    quantized = [row.module for row in plan.coverage if row.low_precision_gemms]
    assert names[0] == f"{quantized[0]}: fprop.x"
    assert names[-1] == f"{quantized[0]}: wgrad.dy"
    assert {name.split(":")[0] for name in names} == set(quantized)
    assert all(amax.shape == (1,) and amax > 0 for amax in recorded_amax(model).values())


def test_a_healthy_step_names_nothing():
    model, _ = make_model()
    assert first_non_finite(model) is None
    model(TOKENS).float().sum().backward()
    assert first_non_finite(model) is None


def test_the_first_layer_that_sees_a_nan_input_is_named():
    model, _ = make_model()
    with torch.no_grad():
        model.embedding.weight[3] = math.nan
    model(TOKENS).float().sum().backward()
    assert first_non_finite(model) == "blocks.0.up_proj: fprop.x"


def test_a_nan_weight_is_named_by_its_layer():
    model, _ = make_model()
    with torch.no_grad():
        model.blocks[1]["up_proj"].weight[0, 0] = math.inf
    model(TOKENS).float().sum().backward()
    assert first_non_finite(model) == "blocks.1.up_proj: fprop.w"


def test_a_nan_that_starts_in_the_backward_is_named_where_the_backward_met_it_first():
    model, _ = make_model()
    hidden: list[torch.Tensor] = []
    model.blocks[1]["down_proj"].register_forward_hook(lambda module, inputs, y: hidden.append(y))
    y = model(TOKENS)
    hidden[0].register_hook(lambda gradient: gradient * math.nan)
    y.float().sum().backward()
    assert first_non_finite(model) == "blocks.1.down_proj: dgrad.dy"


def test_a_nan_of_an_earlier_microbatch_of_the_step_is_still_named():
    model, plan = make_model()
    with torch.no_grad():
        model.embedding.weight[3] = math.nan
    model(TOKENS).float().sum().backward()
    plan.position.start_microbatch(step=0, row_offset=32)
    model(torch.full_like(TOKENS, 7)).float().sum().backward()
    assert first_non_finite(model) == "blocks.0.up_proj: fprop.x"
    plan.position.start_microbatch(step=1, row_offset=0)
    model(torch.full_like(TOKENS, 7)).float().sum().backward()
    assert first_non_finite(model) is None
