import itertools
from dataclasses import replace

import pytest
import torch

from nvfp4_train.model.hybrid import HybridLM, build_model
from nvfp4_train.parallel.stages import BlockCosts, balance, block_costs, plan_stages, stage_ranks
from tests.support.configs import composed
from tests.support.tiny import parallel_layout, tiny_model


def model_of(pattern: str, *, tie_embeddings: bool = False) -> HybridLM:
    with torch.device("meta"):
        return build_model(tiny_model(pattern, tie_embeddings=tie_embeddings))


def cost_of(costs: BlockCosts, bounds: tuple[int, ...]) -> float:
    sums = [sum(costs.blocks[start:end]) for start, end in itertools.pairwise(bounds)]
    sums[0] += costs.before
    sums[-1] += costs.after
    return max(sums)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_stages", [1, 2, 3, 7])
def test_no_division_has_a_cheaper_most_expensive_stage(seed, num_stages):
    rng = torch.Generator().manual_seed(seed)
    values = torch.randint(1, 30, (9,), generator=rng).tolist()
    costs = BlockCosts(blocks=[float(value) for value in values[:7]], before=float(values[7]), after=float(values[8]))
    found = balance(costs, num_stages=num_stages)
    assert [index for part in found for index in part] == list(range(7))
    assert all(found)
    best = min(cost_of(costs, (0, *inner, 7)) for inner in itertools.combinations(range(1, 7), num_stages - 1))
    assert cost_of(costs, (0, *(part.stop for part in found))) == best


def test_fewer_blocks_than_stages_is_an_error():
    with pytest.raises(ValueError, match="2 blocks do not fill 3 pipeline stages"):
        balance(BlockCosts(blocks=[1.0, 1.0], before=0.0, after=0.0), num_stages=3)


def test_embedding_head_and_multi_token_prediction_count():
    plain, tied = (block_costs(model_of("M*-E", tie_embeddings=tied), sequence_length=32) for tied in (False, True))
    assert plain == tied
    head = 3 * 2.0 * 64 * 32 * 32  # three GEMMs of [tokens, d_model] and [vocabulary, d_model]
    assert plain.after == head
    assert plain.before == 2.0 * 32 * 32 + 64 * 32
    with_depth = block_costs(model_of("M*-E/*E"), sequence_length=32)
    assert with_depth.blocks == plain.blocks
    assert with_depth.after > 2 * head


def test_attention_costs_more_in_longer_sequences():
    short, long = (block_costs(model_of("M*"), sequence_length=length) for length in (32, 3200))
    assert long.blocks[1] / long.blocks[0] > short.blocks[1] / short.blocks[0]


def test_an_expensive_head_takes_blocks_from_the_last_stage():
    model = composed("model=hybrid_130m").model
    with torch.device("meta"):
        small, large = (build_model(replace(model, vocab_size=size)) for size in (64, 131072))
    last = [plan_stages(m, parallel_layout(pp=2), sequence_length=2048)[-1].blocks for m in (small, large)]
    assert len(last[1]) < len(last[0])


def test_bars_in_the_pattern_decide():
    plans = plan_stages(model_of("M|*-E"), parallel_layout(pp=2), sequence_length=32)
    assert [plan.blocks for plan in plans] == [range(1), range(1, 4)]
    assert [(plan.is_first, plan.is_last) for plan in plans] == [(True, False), (False, True)]
    costs = block_costs(model_of("M*-E"), sequence_length=32)
    assert plans[1].cost == sum(costs.blocks[1:]) + costs.after


def test_bars_mean_nothing_to_a_single_rank():
    (plan,) = plan_stages(model_of("M|*-E"), parallel_layout(), sequence_length=32)
    assert plan.blocks == range(4)
    assert plan.is_first
    assert plan.is_last


@pytest.mark.parametrize(
    ("pattern", "words"), [("M|*|-", "3 segments .* 2 stages"), ("M*-|", "segment 1 of model.pattern is empty")]
)
def test_bars_that_do_not_fit(pattern, words):
    with pytest.raises(ValueError, match=words):
        plan_stages(model_of(pattern), parallel_layout(pp=2), sequence_length=32)


def test_which_rank_has_which_stage():
    assert stage_ranks(parallel_layout(pp=3)) == [0, 1, 2]
    assert stage_ranks(parallel_layout(pp=2, schedule="interleaved", stages_per_rank=3)) == [0, 1, 0, 1, 0, 1]
    assert stage_ranks(parallel_layout(pp=3, schedule="zbv", stages_per_rank=2)) == [0, 1, 2, 2, 1, 0]
