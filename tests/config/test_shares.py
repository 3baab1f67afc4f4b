from dataclasses import replace

import pytest

from nvfp4_train.config.model import ModelConfig, NormGroup
from nvfp4_train.config.problem import Problem
from nvfp4_train.config.recipe import ComputeDtype
from nvfp4_train.config.shares import SHARES, share_problems
from tests.support.configs import composed, load_problems
from tests.support.recipes import cast_recipe, nvfp4_recipe
from tests.support.tiny import parallel_layout, tiny_model

MODEL = tiny_model("M*-E/*")
BATCH = composed("experiment=tiny").batch


def problems(model: ModelConfig = MODEL, *, sequence_length: int = 64, recipe=None, **layout) -> dict[str, Problem]:
    found = share_problems(
        model,
        parallel_layout(**layout),
        batch=replace(BATCH, sequence_length=sequence_length),
        recipe=recipe or nvfp4_recipe(),
    )
    assert len({problem.key for problem in found}) == len(found)
    return {problem.key: problem for problem in found}


def test_a_layout_that_divides_everything_is_fine():
    assert problems(tp=2) == {}


def test_one_rank_shares_nothing():
    odd = replace(MODEL, vocab_size=63, mamba=replace(MODEL.mamba, norm_group=NormGroup.whole))
    assert problems(odd, tp=1, recipe=cast_recipe(ComputeDtype.fp32), sequence_length=63) == {}


@pytest.mark.parametrize(
    ("part", "changes", "key"),
    [
        ("attention", {"num_heads": 3, "num_kv_heads": 3}, "model.attention.num_kv_heads"),
        ("mamba", {"num_groups": 1}, "model.mamba.num_groups"),
        ("mlp", {"d_ff": 63}, "model.mlp.d_ff"),
        ("moe", {"d_ff": 63}, "model.moe.d_ff"),
        ("moe", {"shared_d_ff": 63}, "model.moe.shared_d_ff"),
        ("moe", {"d_latent": 63}, "model.moe.d_latent"),
        ("", {"vocab_size": 63}, "model.vocab_size"),
    ],
)
def test_each_share_is_checked_for_the_blocks_that_there_are(part, changes, key):
    model = replace(MODEL, **({part: replace(getattr(MODEL, part), **changes)} if part else changes))
    problem = problems(model, tp=2)[key]
    assert "parallel.tp_degree (2)" in problem.rule
    if part:
        without = replace(model, pattern="M" if part != "mamba" else "*")
        assert problems(without, tp=2) == {}


def test_every_share_has_a_case():
    (mark,) = test_each_share_is_checked_for_the_blocks_that_there_are.pytestmark
    assert {key for _, _, key in mark.args[1]} == {share.key for share in SHARES}


def test_blocks_of_multi_token_prediction_count():
    model = replace(MODEL, pattern="-/M", mamba=replace(MODEL.mamba, num_groups=1))
    assert set(problems(model, tp=2)) == {"model.mamba.num_groups"}


def test_the_joined_input_of_multi_token_prediction_is_shared():
    assert set(problems(replace(MODEL, d_model=33, vocab_size=60), tp=4)) >= {"model.d_model"}
    assert "model.d_model" not in problems(replace(MODEL, pattern="-", d_model=33, vocab_size=60), tp=4)


def test_a_norm_over_the_whole_width_is_shared_too():
    model = replace(MODEL, mamba=replace(MODEL.mamba, norm_group=NormGroup.whole))
    assert problems(model, tp=2) == {}


def test_sequence_parallelism_needs_equal_parts_of_the_sequence():
    assert set(problems(tp=2, cp=2, sequence_length=66)) == {"batch.sequence_length"}
    assert problems(tp=2, cp=1, sequence_length=66) == {}
    assert problems(tp=2, cp=2, sequence_length=66, sequence_parallel=False) == {}


def test_an_fp32_recipe_does_not_add_up_in_bf16():
    cfg = composed("experiment=tiny", "model.mamba.num_groups=2", "parallel.tp_degree=2").parallel
    assert cfg.tp_reduce_dtype.value == "bf16"
    found = share_problems(MODEL, cfg, batch=BATCH, recipe=cast_recipe(ComputeDtype.fp32))
    assert [problem.key for problem in found] == ["parallel.tp_reduce_dtype"]
    assert share_problems(MODEL, cfg, batch=BATCH, recipe=nvfp4_recipe()) == []


def test_a_run_with_such_a_layout_names_every_key_at_once():
    found = load_problems("experiment=tiny", "parallel.tp_degree=3", "batch.sequence_length=64")
    assert {"model.vocab_size", "model.attention.num_kv_heads", "model.mamba.num_groups"} <= found.keys()
