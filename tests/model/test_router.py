from dataclasses import replace

import pytest
import torch

from nvfp4_train.config.moe import RouterScore
from nvfp4_train.model.router import Router, balance_experts, balancing_loss, choose_experts, max_violations
from tests.support.models import TINY_MOE

D_MODEL = 16
NOT_SKIPPED = torch.zeros(())


def make_router(**changes) -> Router:
    torch.manual_seed(0)
    router = Router(replace(TINY_MOE, **changes), d_model=D_MODEL)
    torch.nn.init.normal_(router.weight)
    return router


def draw(tokens=50) -> torch.Tensor:
    return torch.randn(tokens, D_MODEL, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("score", RouterScore)
@pytest.mark.parametrize("normalize", [True, False])
def test_weights_are_the_scores_without_the_correction(score, normalize):
    router, h = make_router(score=score, normalize_weights=normalize), draw()
    router.e_score_correction_bias.copy_(torch.linspace(-1, 1, 8))
    logits = h @ router.weight.T
    scores = logits.sigmoid() if score is RouterScore.sigmoid else logits.softmax(-1)
    routing = router(h)
    for token in range(len(h)):
        wanted = set((scores[token] + router.e_score_correction_bias).topk(2).indices.tolist())
        assert set(routing.experts[token].tolist()) == wanted
        own = scores[token, routing.experts[token]]
        torch.testing.assert_close(routing.weights[token], 2.5 * (own / own.sum() if normalize else own))


def test_the_correction_changes_the_choice():
    router, h = make_router(), draw()
    before = router(h).experts
    router.e_score_correction_bias[3] = 10.0
    after = router(h).experts
    assert not (before == 3).any(dim=1).all()
    assert (after == 3).any(dim=1).all()


def test_group_limited_choice():
    cfg = replace(TINY_MOE, num_groups=4, top_groups=2, top_k=3)
    scores = torch.rand(100, 8, generator=torch.Generator().manual_seed(0)) - 0.5  # a corrected score may be negative
    chosen = choose_experts(scores, cfg=cfg)
    for row, experts in zip(scores, chosen, strict=True):
        groups = sorted(range(4), key=lambda g: -row[2 * g : 2 * g + 2].sum())[:2]
        allowed = sorted((e for g in groups for e in (2 * g, 2 * g + 1)), key=lambda e: -row[e])
        assert experts.tolist() == allowed[:3]


def test_groups_of_one_expert():
    cfg = replace(TINY_MOE, num_groups=8, top_groups=2, top_k=2)
    scores = torch.rand(20, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(choose_experts(scores, cfg=cfg), scores.topk(2).indices)


def test_bf16_tokens_are_scored_in_fp32():
    router, h = make_router(), draw().bfloat16()
    assert router(h).weights.dtype == torch.float32
    assert torch.equal(router(h).weights, router(h.float()).weights)


def test_the_router_learns_through_the_weights():
    router = make_router()
    router(draw()).weights[:, 0].sum().backward()
    assert router.weight.grad.abs().sum() > 0


def test_the_balancing_loss_is_1_when_balanced_and_more_when_not():
    even = torch.full((8, 4), 0.25)
    assert balancing_loss(even, counts=torch.tensor([4, 4, 4, 4])).item() == pytest.approx(1)
    skewed = torch.tensor([[0.7, 0.1, 0.1, 0.1]]).expand(8, 4)
    assert balancing_loss(skewed, counts=torch.tensor([8, 0, 0, 0])).item() == pytest.approx(4 * 0.7)


def test_penalties_are_weighted_sums():
    h = draw()
    logits = h @ make_router().weight.T
    z_loss = logits.logsumexp(-1).square().mean()
    only_z = make_router(z_loss_weight=0.5)(h).penalty
    torch.testing.assert_close(only_z, 0.5 * z_loss)
    router = make_router(auxiliary_loss_weight=0.1)
    auxiliary = router(h).penalty
    torch.testing.assert_close(auxiliary, 0.1 * balancing_loss(logits.sigmoid(), counts=router.tokens_per_expert))
    both = make_router(auxiliary_loss_weight=0.1, z_loss_weight=0.5)(h).penalty
    torch.testing.assert_close(both, only_z + auxiliary)
    assert make_router()(h).penalty is None


def test_minimizing_the_balancing_loss_balances():
    router, h = make_router(auxiliary_loss_weight=1.0), draw(400)
    first = router(h).penalty.item()
    for _ in range(60):
        penalty = router(h).penalty
        (grad,) = torch.autograd.grad(penalty, router.weight)
        with torch.no_grad():
            router.weight -= 2.0 * grad
    assert router(h).penalty.item() < first
    assert router(h).penalty.item() < 1.05


def test_only_forwards_with_gradients_count_and_have_penalties():
    router = make_router(auxiliary_loss_weight=1.0)
    with torch.no_grad():
        assert router(draw()).penalty is None
    assert router.tokens_per_expert.sum() == 0
    router(draw())
    assert router.tokens_per_expert.sum() == 100


def test_corrections_move_by_the_sign_of_the_load_and_counts_restart():
    router = make_router(bias_update_rate=0.25)
    router.tokens_per_expert.copy_(torch.tensor([10, 0, 5, 5, 5, 5, 5, 5]))
    balance_experts(router, sum_over_data=torch.clone, skip=NOT_SKIPPED)
    assert router.e_score_correction_bias.tolist() == [-0.25, 0.25, 0, 0, 0, 0, 0, 0]
    assert router.tokens_per_expert.sum() == 0
    assert {name: value.item() for name, value in max_violations(router).items()} == {"": 1.0}


def test_loads_are_summed_over_ranks():
    router = make_router(bias_update_rate=0.25)
    other = torch.tensor([0, 20, 0, 0, 0, 0, 0, 0])
    router.tokens_per_expert.copy_(torch.tensor([10, 0, 0, 0, 0, 0, 0, 0]))
    balance_experts(router, sum_over_data=lambda counts: counts + other, skip=NOT_SKIPPED)
    assert router.e_score_correction_bias.tolist() == [-0.25, -0.25] + 6 * [0.25]


def test_a_skipped_step_moves_nothing():
    router = make_router(bias_update_rate=0.25)
    router.tokens_per_expert[0] = 8
    balance_experts(router, sum_over_data=torch.clone, skip=torch.ones(()))
    assert not router.e_score_correction_bias.any()
    assert router.tokens_per_expert.sum() == 0


def test_no_routers_no_reduction():
    balance_experts(torch.nn.Linear(2, 2), sum_over_data=lambda counts: pytest.fail("reduced"), skip=NOT_SKIPPED)
    assert max_violations(torch.nn.Linear(2, 2)) == {}
    assert max_violations(make_router()) == {}


def test_repeated_corrections_balance_a_skewed_router():
    router, h = make_router(bias_update_rate=0.02), draw(500)
    h[:, 0] = 3.0
    with torch.no_grad():
        router.weight[:, 0] = torch.linspace(0, 1, 8)
    violations = []
    for _ in range(150):
        router(h)
        balance_experts(router, sum_over_data=torch.clone, skip=NOT_SKIPPED)
        violations.append(max_violations(router)[""].item())
    assert violations[-1] < 0.25 < violations[0]
