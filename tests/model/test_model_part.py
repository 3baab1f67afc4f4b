from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nvfp4_train.config.model import ModelConfig
from nvfp4_train.model.hybrid import HybridLM
from nvfp4_train.model.model_part import (
    ModelPart,
    boundary_values,
    embeds_at_end,
    extra_loss_names,
    has_penalties,
    router_names,
)
from nvfp4_train.model.router import Router
from tests.support.models import document_ids, initialized
from tests.support.tiny import tiny_model

TOKENS = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(0))
LABELS = TOKENS.roll(-1, dims=1)
IDS = document_ids(13, 19, rows=2)


def with_penalties(cfg: ModelConfig) -> ModelConfig:
    return replace(cfg, moe=replace(cfg.moe, auxiliary_loss_weight=0.01, z_loss_weight=0.001))


MODELS = {
    "plain": tiny_model("M*-E"),
    "fp32 stream": replace(tiny_model("M*-E"), residual_fp32=True),
    "penalties": with_penalties(tiny_model("ME*E")),
    "tied": tiny_model("M*-E", tie_embeddings=True),
    "depths": with_penalties(tiny_model("ME*-/*E/*E")),
}


def run(parts: list[ModelPart]) -> Tensor:
    values: Tensor | tuple[Tensor, ...] = ()
    for part in parts:
        inputs = values if isinstance(values, tuple) else (values,)
        values = part(*inputs, tokens=TOKENS, document_ids=IDS, position_ids=None, labels=LABELS)
    assert isinstance(values, Tensor)
    return values


def parts_of(model: HybridLM, *bounds: int) -> list[ModelPart]:
    pairs = list(zip((0, *bounds), (*bounds, 4), strict=True))
    return [ModelPart(model, blocks=range(start, end), is_first=start == 0, is_last=end == 4) for start, end in pairs]


@pytest.mark.parametrize("bounds", [(2,), (1, 2, 3)])
@pytest.mark.parametrize("name", MODELS)
def test_parts_in_a_row_are_the_model(name, bounds):
    model = initialized(MODELS[name])
    if name == "fp32 stream":  # of another dtype than activations; sums of the others would round in another order
        model.compute_dtype = torch.bfloat16
    whole = model(TOKENS, document_ids=IDS, labels=LABELS)
    whole.backward()
    expected = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
    extra = model.extra_losses
    model.zero_grad()
    parts = parts_of(model, *bounds)
    loss = run(parts)
    loss.backward()
    assert torch.equal(loss, whole)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[key], rtol=1e-5, atol=1e-6)
    assert list(parts[-1].extra_losses) == list(extra) == extra_loss_names(model.cfg)
    for key, value in extra.items():
        torch.testing.assert_close(parts[-1].extra_losses[key], value)
    with torch.no_grad():
        assert torch.equal(run(parts), model(TOKENS, document_ids=IDS, labels=LABELS))


@pytest.mark.parametrize("name", MODELS)
def test_boundaries_are_as_announced(name):
    model = initialized(MODELS[name])
    model.compute_dtype = torch.bfloat16
    part = parts_of(model, 2)[0]
    found = part(tokens=TOKENS, document_ids=IDS, position_ids=None, labels=LABELS)
    found = found if isinstance(found, tuple) else (found,)
    expected = boundary_values(model.cfg, shape=(2, 32), compute_dtype=torch.bfloat16, device=torch.device("cpu"))
    for value, announced in zip(found, expected, strict=True):
        assert (value.shape, value.dtype, value.stride()) == (announced.shape, announced.dtype, announced.stride())


def test_names_and_modules_are_those_of_the_model():
    model = initialized(MODELS["depths"])
    first, last = parts_of(model, 3)
    assert sorted({*dict(first.named_parameters()), *dict(last.named_parameters())}) == sorted(
        dict(model.named_parameters())
    )
    for part in (first, last):
        for name, parameter in part.named_parameters():
            assert parameter is model.get_parameter(name)
    assert {name.split(".")[0] for name in dict(first.named_parameters())} == {"embedding", "blocks"}
    assert "embedding.weight" in dict(last.named_parameters())
    assert [block.kind for block in first.all_blocks()] == list(model.cfg.layer_kinds[:3])


def test_what_an_end_needs():
    assert [name for name, cfg in MODELS.items() if embeds_at_end(cfg)] == ["tied", "depths"]
    assert [name for name, cfg in MODELS.items() if has_penalties(cfg)] == ["penalties", "depths"]
    assert not has_penalties(with_penalties(tiny_model("M*-M/E")))  # only the depths have routers


@pytest.mark.parametrize("share_depths", [False, True])
@pytest.mark.parametrize("pattern", ["M*-", "ME*E", "ME*-/*E/*E", "M/E"])
def test_names_of_all_routers_are_known_without_the_model(pattern, share_depths):
    cfg = tiny_model(pattern)
    cfg = replace(cfg, mtp=replace(cfg.mtp, share_depths=share_depths))
    with torch.device("meta"):
        model = HybridLM(cfg)
    assert router_names(cfg) == [name for name, module in model.named_modules() if isinstance(module, Router)]


def test_routers_of_depths_alone_have_a_penalty():
    assert extra_loss_names(with_penalties(tiny_model("M/E"))) == ["mtp_1", "router"]
    assert extra_loss_names(tiny_model("ME/E")) == ["mtp_1"]
