"""The parameters of ranks together are those of the model."""

from dataclasses import replace

import pytest

from nvfp4_train.analysis.plan.layout import Layout
from nvfp4_train.analysis.plan.local import build_on_meta, model_keys
from nvfp4_train.analysis.plan.parameters import Parameter, Parameters, num_parameters
from nvfp4_train.config.train import TrainConfig
from tests.support.configs import composed

WHOLE = Layout(micro_batch_size=1, global_batch_size=8, sequence_length=64)
MODELS = ["demo", "paper_12b", "nemotron_3_nano_30b_a3b", "nemotron_3_super_120b_a12b"]


def total(cfg: TrainConfig, layout: Layout) -> int:
    listed = Parameters(model=cfg.model, recipe=cfg.recipe)
    keys = model_keys(build_on_meta(cfg.model, cfg.recipe), cfg.recipe)
    blocks = sum(num_parameters(listed.block(key, layout)) for key in keys.blocks)
    return blocks + sum(map(num_parameters, listed.ends(layout).values()))


@pytest.mark.parametrize("model", MODELS)
def test_one_rank_has_the_whole_model(model: str):
    cfg = composed(f"model={model}", "recipe=bf16")
    built = build_on_meta(cfg.model, cfg.recipe).model
    assert total(cfg, WHOLE) == sum(parameter.numel() for parameter in built.parameters())


def test_experts_are_divided_over_ep():
    cfg = composed("model=nemotron_3_nano_30b_a3b", "recipe=bf16")
    listed = Parameters(model=cfg.model, recipe=cfg.recipe)
    keys = model_keys(build_on_meta(cfg.model, cfg.recipe), cfg.recipe)
    [moe] = [key for key in set(keys.blocks) if key.kind.value == "E"]
    layout = replace(WHOLE, dp_shard=8, ep=8)
    for whole, part in zip(listed.block(moe, WHOLE), listed.block(moe, layout), strict=True):
        assert whole.numel == part.numel * (8 if part.is_expert else 1)
        assert part.is_expert == (".experts." in part.name)


def test_most_of_a_model_is_divided_over_tp():
    cfg = composed("model=paper_12b", "recipe=bf16")
    assert total(cfg, replace(WHOLE, tp=8)) == pytest.approx(total(cfg, WHOLE) / 8, rel=1e-3)


def test_shards_of_uneven_rows():
    layout = replace(WHOLE, dp_shard=4)
    parameter = Parameter(name="x", shape=(10, 3), is_expert=False, is_fp32=False, precision=None)
    assert [parameter.shard(layout, index=index) for index in range(4)] == [9, 9, 9, 3]
    short = replace(parameter, shape=(2, 3))
    assert [short.shard(layout, index=index) for index in range(4)] == [3, 3, 0, 0]


def test_small_modules_are_read_in_fp32():
    cfg = composed("model=demo", "recipe=nvfp4")
    listed = Parameters(model=cfg.model, recipe=cfg.recipe)
    keys = model_keys(build_on_meta(cfg.model, cfg.recipe), cfg.recipe)
    in_fp32 = {p.name.split(".")[-2] for key in keys.blocks for p in listed.block(key, WHOLE) if p.is_fp32}
    assert in_fp32 == {"norm", "conv1d", "scan"}
