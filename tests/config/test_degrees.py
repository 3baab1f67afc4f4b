"""Rules between degrees and what they divide; those of one group alone are in test_parallel."""

from dataclasses import replace

import pytest

from nvfp4_train.config.degrees import tokens_of_a_block
from tests.support.configs import composed, load_problems

EXPERTS = ("experiment=tiny", "model.pattern=ME*E", "model.moe.num_experts=6", "model.moe.top_k=2")


@pytest.mark.parametrize(
    ("recipe", "tokens"),
    [("fp32", 16), ("nvfp4", 16), ("nvfp4_rht128", 128), ("nvfp4_outer128", 128), ("fp8_block", 128), ("mxfp8", 32)],
)
def test_a_part_of_a_row_holds_whole_blocks(recipe: str, tokens: int):
    cfg = composed("experiment=tiny", f"recipe={recipe}", "batch.sequence_length=256")
    assert tokens_of_a_block(cfg.recipe) == tokens
    overrides = ("experiment=tiny", f"recipe={recipe}", "parallel.cp_degree=2", "batch.global_batch_size=8")
    assert composed(*overrides, f"batch.sequence_length={2 * tokens}").parallel.cp_degree == 2
    problem = load_problems(*overrides, f"batch.sequence_length={3 * tokens}")["parallel.cp_degree"]
    assert f"({3 * tokens})" in problem.rule
    assert f"whole blocks of {tokens} tokens" in problem.rule


def test_experts_are_shared_evenly():
    shared = composed(*EXPERTS, "parallel.dp_shard_degree=2", "parallel.ep_degree=2")
    assert shared.parallel.ep_degree == 2
    problems = load_problems(*EXPERTS, "parallel.dp_shard_degree=4", "parallel.ep_degree=4")
    assert problems["parallel.ep_degree"].rule == "must divide model.moe.num_experts (6)"


def test_experts_of_multi_token_prediction_count():
    cfg = composed("experiment=tiny", "model.pattern=M-/*E", "parallel.dp_shard_degree=2", "parallel.ep_degree=2")
    assert cfg.model.pattern.endswith("E")


def test_a_model_without_experts_has_none_to_share():
    problems = load_problems("experiment=tiny", "parallel.dp_shard_degree=2", "parallel.ep_degree=2")
    assert "no block E" in problems["parallel.ep_degree"].rule


def test_a_wrong_value_elsewhere_does_not_hide_a_rule():
    problems = load_problems("experiment=tiny", "parallel.cp_degree=3", "batch.micro_batch_size=0")
    assert {"parallel.cp_degree", "batch.micro_batch_size"} <= set(problems)


def test_degrees_of_one_ask_for_nothing():
    cfg = composed("experiment=tiny", "recipe=fp32", "batch.sequence_length=6")
    assert replace(cfg).parallel.cp_degree == 1
