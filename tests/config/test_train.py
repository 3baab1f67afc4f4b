from dataclasses import replace

import pytest

from nvfp4_train.config.load import load_config
from nvfp4_train.config.recipe import KeepBf16
from nvfp4_train.config.train import ResumeMode, cross_group_problems
from tests.support.configs import composed, load_problems, problems_of

TINY = composed("experiment=tiny")


def test_resume_modes_are_named_like_their_values():
    assert {mode.name: mode.value for mode in ResumeMode} == {"continue": "continue", "fork": "fork"}


def test_a_valid_config_has_no_problems():
    assert cross_group_problems(TINY) == []


@pytest.mark.parametrize(
    ("group", "changes", "key"),
    [
        ("model", {"vocab_size": 260}, "model.vocab_size"),
        ("scheduler", {"warmup_tokens": 20_480, "decay_fraction": 0.0}, "scheduler.warmup_tokens"),
        ("scheduler", {"decay_fraction": 0.95}, "scheduler.decay_fraction"),
        ("parallel", {"dp_shard_degree": 4}, "batch.global_batch_size"),
        ("parallel", {"dp_replicate_degree": 3}, "batch.global_batch_size"),
        ("model", {"d_model": 72}, "model.d_model"),
        ("batch", {"sequence_length": 6}, "batch.sequence_length"),
        ("parallel", {"cp_degree": 3}, "parallel.cp_degree"),
        ("parallel", {"cp_degree": 8}, "parallel.cp_degree"),  # parts of 8 tokens
        ("parallel", {"ep_degree": 2, "dp_shard_degree": 2}, "parallel.ep_degree"),  # no experts
    ],
)
def test_a_violated_rule_names_its_key(group, changes, key):
    changed = replace(getattr(TINY, group), **changes)
    assert [problem.key for problem in problems_of(lambda: replace(TINY, **{group: changed}))] == [key]


def test_a_ramp_is_shared_by_the_data_ranks_too():
    ramp = replace(TINY.batch.ramp, start=4, increment=4, tokens=1024)
    batch, parallel = replace(TINY.batch, ramp=ramp), replace(TINY.parallel, dp_shard_degree=2)
    problems = problems_of(lambda: replace(TINY, batch=batch, parallel=parallel))
    assert [problem.key for problem in problems] == ["batch.ramp.start", "batch.ramp.increment"]


def test_a_batch_that_is_no_multiple_of_its_microbatches_is_one_problem():
    problems = problems_of(lambda: load_config(["experiment=tiny", "batch.global_batch_size=10"]))
    assert [problem.key for problem in problems] == ["batch.global_batch_size"]


@pytest.mark.parametrize(
    ("resume", "mode", "keys"),
    [
        ("", "continue", ["resume"]),
        ("auto", "fork", ["resume_mode"]),
        ("never", "fork", ["resume_mode"]),
        ("runs/a/checkpoints/step_00000010", "fork", []),
        ("runs/a/checkpoints/step_00000010", "continue", []),
    ],
)
def test_a_fork_names_its_checkpoint(resume, mode, keys):
    overrides = ["experiment=tiny", f"resume='{resume}'", f"resume_mode={mode}"]
    if keys:
        assert list(load_problems(*overrides)) == keys
    else:
        assert composed(*overrides).resume == resume


def test_widths_are_free_in_bf16():
    assert composed("recipe=bf16", "model.d_model=250").model.d_model == 250


def test_widths_are_checked_even_where_the_pattern_is_wrong():
    assert list(load_problems("model.pattern=M-X", "model.d_model=250")) == ["model.pattern", "model.d_model"]


def test_widths_are_checked_even_where_an_operand_is_wrong():
    problems = load_problems("recipe.linear.fprop.x.block=row_1x32", "model.mlp.d_ff=1000")
    assert list(problems) == ["recipe.linear.fprop.x.block", "model.mlp.d_ff"]


@pytest.mark.parametrize(
    ("keep", "keys"),
    [
        ({"first_blocks": 5}, []),
        ({"last_blocks": 5}, []),
        ({"modules": ["lm_head", "blocks.*"]}, []),
        ({"modules": ["lm_head", "*.up_proj"]}, ["model.mlp.d_ff"]),
        ({"modules": ["lm_head", "*.up_proj", "*.down_proj"]}, []),
    ],
)
def test_a_width_matters_where_a_linear_that_has_it_is_quantized(keep, keys):
    mlp = replace(TINY.model.mlp, d_ff=100)
    model = replace(TINY.model, pattern="M-M--", mlp=mlp)
    recipe = replace(
        TINY.recipe, keep_bf16=KeepBf16(**{"first_blocks": 0, "last_blocks": 0, "modules": ["lm_head"]} | keep)
    )
    if keys:
        assert [problem.key for problem in problems_of(lambda: replace(TINY, model=model, recipe=recipe))] == keys
    else:
        assert replace(TINY, model=model, recipe=recipe).model.mlp.d_ff == 100


TENSOR_PARALLEL = (
    "experiment=tiny",
    "model.mamba.num_groups=2",
    "recipe.keep_bf16.first_blocks=0",
    "recipe.keep_bf16.last_blocks=0",
)


def test_a_rank_s_part_of_a_width_is_judged_and_not_the_whole():
    """48 columns are three blocks of 16, and half of them one and a half."""
    assert composed(*TENSOR_PARALLEL, "model.mlp.d_ff=48").model.mlp.d_ff == 48
    problem = load_problems(*TENSOR_PARALLEL, "model.mlp.d_ff=48", "parallel.tp_degree=2")["model.mlp.d_ff"]
    assert "a rank holds 24" in problem.rule
    assert "multiples of 16" in problem.rule


def test_an_odd_multiple_of_a_block_is_fine():
    """The Mamba projection of 18560 rows over 8 ranks: 2320 = 145 x 16."""
    cfg = composed("model=nemotron_h_8b", "recipe=nvfp4_all_blocks", "parallel.tp_degree=8")
    assert 18560 // cfg.parallel.tp_degree == 145 * 16


def test_blocks_of_32_are_not_cut_either():
    """A group of 304 rows is 19 blocks of 16; its codes would depend on the rank's neighbours with blocks of 32."""
    groups = ("model.mamba.num_heads=32", "model.mamba.d_head=8", "model.mamba.d_state=16")
    assert composed(*TENSOR_PARALLEL, *groups, "parallel.tp_degree=2").model.mamba.num_groups == 2
    found = load_problems(*TENSOR_PARALLEL, *groups, "parallel.tp_degree=2", "recipe=mxfp4")
    assert "multiples of 32" in found["model.mamba.num_heads"].rule


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["parallel.dp_replicate_degree=2"], "parallel.dp_replicate_degree"),
        (["parallel.pp_degree=2"], "parallel.pp_degree"),
        (["parallel.cp_degree=2"], "parallel.cp_degree"),
        (["parallel.tp_degree=2", "model.mamba.num_groups=2"], "parallel.tp_degree"),
        (["parallel.ep_degree=2", "parallel.dp_shard_degree=2", "model.pattern=M*-E"], "parallel.ep_degree"),
        (["parallel.compile=block"], "parallel.compile"),
        (["optimizer=muon"], "optimizer"),
        (["optimizer.state_dtype=bf16"], "optimizer.state_dtype"),
    ],
)
def test_what_deepspeed_cannot_do_is_refused_with_a_way_out(overrides, key):
    problem = load_problems("engine=deepspeed", *overrides)[key]
    assert "engine=deepspeed" in problem.rule
    assert "engine=torch" in problem.fix
    composed("engine=torch", *overrides)


def test_deepspeed_offloads_in_its_own_way():
    problem = load_problems("engine=deepspeed", "optimizer.state_offload=cpu")["optimizer.state_offload"]
    assert "engine.offload_optimizer=cpu" in problem.fix


def test_deepspeed_takes_every_rank_as_a_shard():
    assert composed("engine=deepspeed", "parallel.dp_shard_degree=2").parallel.dp_shard_degree == 2
