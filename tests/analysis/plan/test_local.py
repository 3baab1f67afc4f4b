"""The part of a model that a tp rank holds."""

import pytest

from nvfp4_train.analysis.plan.layout import Layout
from nvfp4_train.analysis.plan.local import BlockKey, build_on_meta, local_block, local_config, model_keys
from nvfp4_train.config.pattern import LayerKind
from nvfp4_train.config.problem import ConfigError
from tests.support.configs import composed

HALF = Layout(tp=2, micro_batch_size=1, global_batch_size=1, sequence_length=64)
CFG = composed("model=hybrid_130m", "recipe=nvfp4", "recipe.keep_bf16.first_blocks=1", "recipe.keep_bf16.last_blocks=1")


def test_a_tp_rank_has_its_heads_groups_and_columns():
    local = local_config(CFG.model, HALF)
    assert 2 * local.mamba.num_heads == CFG.model.mamba.num_heads
    assert 2 * local.attention.num_heads == CFG.model.attention.num_heads
    assert 2 * local.mlp.d_ff == CFG.model.mlp.d_ff
    assert 2 * local.vocab_size == CFG.model.vocab_size
    assert local.d_model == CFG.model.d_model


def test_blocks_are_told_apart_by_what_stays_in_bf16():
    keys = model_keys(build_on_meta(CFG.model, CFG.recipe), CFG.recipe)
    assert len(keys.blocks) == len(CFG.model.layer_kinds)
    assert keys.blocks[0].is_kept
    assert keys.blocks[-1].is_kept
    assert not any(key.is_kept for key in keys.blocks[1:-1])
    assert keys.kept_ends == {"lm_head"}


def test_multi_token_prediction_has_keys_of_its_own():
    cfg = composed("model=nemotron_3_nano_30b_a3b", "model.pattern=ME*/*E/*E", "recipe=nvfp4")
    keys = model_keys(build_on_meta(cfg.model, cfg.recipe), cfg.recipe)
    assert [key.kind for key in keys.mtp] == [LayerKind.attention, LayerKind.moe]
    assert all(key.is_kept for key in keys.mtp)
    assert keys.kept_ends == {"lm_head", "eh_proj"}


def test_a_block_alone_runs_what_it_runs_in_the_model():
    key = BlockKey(kind=LayerKind.mlp, kept=frozenset({"down_proj"}))
    rows = {row.module: row for row in local_block(key, CFG.model, CFG.recipe, layout=HALF).coverage}
    assert rows["blocks.0.mixer.down_proj"].recipe == "bf16"
    assert rows["blocks.0.mixer.up_proj"].recipe == "nvfp4"
    assert rows["blocks.0.mixer.up_proj"].out_features == CFG.model.mlp.d_ff // 2


def test_local_widths_are_held_against_the_recipe():
    cfg = composed("experiment=demo", "model.mlp.d_ff=528")  # half of it is 16 blocks and a half
    key = BlockKey(kind=LayerKind.mlp, kept=frozenset())
    with pytest.raises(ConfigError, match="up_proj"):
        local_block(key, cfg.model, cfg.recipe, layout=HALF)
