from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from nvfp4_train.config.recipe import ComputeDtype, RecipeConfig
from nvfp4_train.precision.apply import apply_precision
from nvfp4_train.precision.deferred_gradients import DeferredGradients
from nvfp4_train.precision.linear_rows import LinearCall
from tests.support.models import document_ids, initialized
from tests.support.recipes import cast_recipe, nvfp4_recipe
from tests.support.tiny import tiny_model

TOKENS = torch.randint(0, 64, (1, 32), generator=torch.Generator().manual_seed(0))
RECIPES = {"fp32": cast_recipe(ComputeDtype.fp32), "bf16": cast_recipe(ComputeDtype.bf16), "nvfp4": nvfp4_recipe()}


def build(recipe: RecipeConfig) -> nn.Module:
    model = initialized(tiny_model("M-*E/*E"))
    apply_precision(model, recipe, seed=0)
    return model


def loss_of(model: nn.Module, tokens: Tensor = TOKENS) -> Tensor:
    return model(tokens, document_ids=document_ids(13, 19), labels=tokens)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.fixture(params=RECIPES)
def recipe(request) -> RecipeConfig:
    return RECIPES[request.param]


def test_later_is_bitwise_the_same(recipe):
    """Over two microbatches, whose weight gradients come in order but long after those of the inputs."""
    plain, apart = build(recipe), build(recipe)
    deferred = DeferredGradients(apart)
    later: list[Callable[[], None]] = []
    for tokens in (TOKENS, TOKENS.flip(1)):
        loss_of(plain, tokens).backward()
        loss_of(apart, tokens).backward()
        later.append(deferred.take())
    waiting = {name for name, parameter in apart.named_parameters() if parameter.grad is None}
    matrices = {name for name, _ in apart.named_parameters() if name.endswith(("_proj.weight", "lm_head.weight"))}
    assert waiting == matrices
    for run in later:
        run()
    found, expected = gradients(apart), gradients(plain)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def test_every_gemm_runs_once_and_those_of_weights_when_they_are_asked_for(monkeypatch):
    model = build(RECIPES["nvfp4"])
    deferred = DeferredGradients(model)
    counts = {"gemms": 0}
    original = LinearCall._multiply

    def multiply(*args: object) -> Tensor:
        counts["gemms"] += 1
        return original(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(LinearCall, "_multiply", multiply)
    loss = loss_of(model)
    forward = counts["gemms"]
    loss.backward()
    assert counts["gemms"] == 2 * forward
    later = deferred.take()
    later()
    assert counts["gemms"] == 3 * forward
    deferred.take()()  # nothing waits any more
    assert counts["gemms"] == 3 * forward


def test_what_was_taken_runs_once():
    model = build(RECIPES["fp32"])
    deferred = DeferredGradients(model)
    loss_of(model).backward()
    later = deferred.take()
    later()
    with pytest.raises(AssertionError, match="once"):
        later()


def test_a_bf16_weight_gets_an_fp32_gradient(recipe):
    """As FSDP hands them out."""
    model = build(recipe)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data = parameter.data.bfloat16()
    if model.compute_dtype is torch.float32:
        pytest.skip("FP32 activations have FP32 weights")
    deferred = DeferredGradients(model)
    loss_of(model).backward()
    deferred.take()()
    assert model.get_parameter("blocks.0.mixer.in_proj.weight").grad.dtype is torch.float32
    assert model.get_parameter("blocks.3.mixer.experts.up_proj.weight").grad.dtype is torch.float32
