"""What stands in for other ranks has the shapes that they would send."""

import torch
from torch import nn

from nvfp4_train.analysis.plan.stand_ins import as_expert_rank, part_of_rows
from nvfp4_train.model.moe import Experts
from tests.support.models import TINY_MOE

IDS = torch.zeros(2, 12, dtype=torch.int64)


def test_without_context_parallelism_rows_are_whole():
    assert part_of_rows(IDS, cp=1).part is None


def test_the_last_part_sees_the_keys_of_whole_rows():
    documents = part_of_rows(IDS, cp=3)
    assert documents.ids.shape == (2, 4)
    key = torch.randn(2, 1, 4, 5)
    assert [tensor.shape for tensor in documents.with_seen(key, key)] == [(2, 1, 12, 5)] * 2


def test_a_window_sees_its_part_and_the_tokens_before_it():
    key = torch.randn(2, 1, 4, 5)
    for tensor in part_of_rows(IDS, cp=3).with_seen(key, key, window_tokens=3):
        assert tensor.shape == (2, 1, 2 + 4, 5)


def test_tokens_cross_the_borders_of_a_part():
    documents = part_of_rows(IDS, cp=3)
    assert documents.part is not None
    exchange, x = documents.part.exchange, torch.randn(2, 4, 5)
    assert exchange.preceding(x, 3).shape == exchange.following(x, 3).shape == (2, 3, 5)
    for carry in (exchange.carry_forward, exchange.carry_backward):
        assert carry(x, torch.ones(2, 4, 1)).shape == x.shape


def test_an_expert_rank_has_its_experts_and_as_many_tokens():
    experts = Experts(TINY_MOE, width=8)
    as_expert_rank(nn.ModuleList([experts]), ep=2)
    ends = torch.arange(1, TINY_MOE.num_experts + 1, dtype=torch.int32) * 3
    tokens = torch.randn(3 * TINY_MOE.num_experts, 8)
    arrived = experts.exchange(tokens, ends)
    assert arrived.tokens.shape == tokens.shape
    assert arrived.ends.tolist() == [6 * (index + 1) for index in range(TINY_MOE.num_experts // 2)]
    assert torch.equal(arrived.send_back(arrived.tokens), tokens)
