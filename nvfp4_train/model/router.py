"""Which experts a token is sent to, and what keeps their load balanced."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nvfp4_train.config.moe import MoeConfig, RouterScore

TINY = 1e-20  # keeps the sum of a token's scores from being 0


class Routing(NamedTuple):
    """The choice of every token; a tuple, because FSDP's hooks look into those and not into dataclasses.

    Args:
        experts: [T, K] int64.
        weights: [T, K] FP32, factors on the outputs of the experts.
        penalty: FP32 scalar, the weighted auxiliary losses of a router that has some; to be minimized per token.
    """

    experts: Tensor
    weights: Tensor
    penalty: Tensor | None


class Router(nn.Module):
    """Scores the experts in FP32 and chooses by score plus a correction, which is a buffer and not trained.

    Source: the correction is that of https://arxiv.org/abs/2408.15664; group-limited choice, DeepSeek-V3,
    https://arxiv.org/abs/2412.19437; the balancing loss, Switch Transformer, https://arxiv.org/abs/2101.03961; the loss
    of the logits, ST-MoE, https://arxiv.org/abs/2202.08906.
    """

    keep_fp32 = True

    def __init__(self, cfg: MoeConfig, *, d_model: int) -> None:
        super().__init__()
        self.cfg = cfg
        self.weight = nn.Parameter(torch.empty(cfg.num_experts, d_model))
        self.e_score_correction_bias: Tensor
        self.tokens_per_expert: Tensor
        self.register_buffer("e_score_correction_bias", torch.zeros(cfg.num_experts))
        # Tokens sent to each expert since the last `balance_experts`, counted in forwards that record gradients.
        # A recomputed forward counts again, alike for all experts of a router, which changes no decision and no ratio.
        self.register_buffer("tokens_per_expert", torch.zeros(cfg.num_experts, dtype=torch.int64), persistent=False)
        # Sums the choices [E] of the tokens that share a balancing loss over those that hold parts of the same rows.
        self.sum_over_parts: Callable[[Tensor], Tensor] = _keep
        # Those of the newest step over all data ranks, for `max_violations`; [E] int64.
        self.load: Tensor | None = None

    def forward(self, h: Tensor) -> Routing:
        """Choose experts for [T, D]."""
        logits = F.linear(h.to(self.weight.dtype), self.weight)
        scores = logits.sigmoid() if self.cfg.score is RouterScore.sigmoid else logits.softmax(dim=-1)
        experts = choose_experts((scores + self.e_score_correction_bias).detach(), cfg=self.cfg)
        weights = scores.gather(1, experts)
        if self.cfg.normalize_weights:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + TINY)
        penalty = None
        if torch.is_grad_enabled():
            counts = _count(experts, num_experts=self.cfg.num_experts)
            self.tokens_per_expert += counts
            penalty = self._penalty(logits, scores=scores, counts=counts)
        return Routing(experts=experts, weights=weights * self.cfg.routed_scaling, penalty=penalty)

    def _penalty(self, logits: Tensor, *, scores: Tensor, counts: Tensor) -> Tensor | None:
        terms = []
        if self.cfg.auxiliary_loss_weight:
            terms.append(self.cfg.auxiliary_loss_weight * balancing_loss(scores, counts=self.sum_over_parts(counts)))
        if self.cfg.z_loss_weight:
            terms.append(self.cfg.z_loss_weight * logits.logsumexp(dim=-1).square().mean())
        return torch.stack(terms).sum() if terms else None


def choose_experts(scores: Tensor, *, cfg: MoeConfig) -> Tensor:
    """Return the ``top_k`` experts with the highest scores, within the ``top_groups`` best groups.

    Args:
        scores: [T, E], corrected. A group counts as the sum of its two highest.
        cfg: How many to choose.

    Returns:
        [T, K] int64.
    """
    if cfg.top_groups < cfg.num_groups:
        grouped = scores.unflatten(1, (cfg.num_groups, -1))  # [T, G, E/G]
        best_two = grouped.topk(min(2, grouped.shape[2]), dim=-1).values.sum(dim=-1)
        allowed = torch.zeros_like(best_two, dtype=torch.bool).scatter(1, best_two.topk(cfg.top_groups).indices, True)
        scores = grouped.masked_fill(~allowed[..., None], float("-inf")).flatten(1)
    return scores.topk(cfg.top_k, dim=-1).indices


def balancing_loss(scores: Tensor, *, counts: Tensor) -> Tensor:
    """Return E * sum over experts of (share of the choices) * (mean share of the score); 1 when balanced.

    Args:
        scores: [T, E], not negative; a token's scores are divided by their sum.
        counts: [E] int64, choices of each expert by these tokens, or by more tokens that include them, whose loss is
            then the mean over all such parts; no gradient passes through them.
    """
    shares = scores / (scores.sum(dim=-1, keepdim=True) + TINY)
    return len(counts) * (counts / counts.sum() * shares.mean(dim=0)).sum()


@torch.no_grad()
def balance_experts(model: nn.Module, *, sum_over_data: Callable[[Tensor], Tensor], skip: Tensor) -> None:
    """Move the corrections of all routers after an optimizer step and forget the counted tokens.

    An expert below the mean load of its router gets ``bias_update_rate`` more, one above it as much less. All routers
    share one sum over the data ranks; without routers nothing happens.

    Args:
        model: Holds routers.
        sum_over_data: Sums an int64 tensor over the data ranks.
        skip: Scalar; where it is 1, the step was not applied and the corrections stay as they are.
    """
    routers = {name: module for name, module in model.named_modules() if isinstance(module, Router)}
    if not routers:
        return
    counts = sum_over_data(torch.cat([router.tokens_per_expert for router in routers.values()]))
    sizes = [router.cfg.num_experts for router in routers.values()]
    for router, total in zip(routers.values(), counts.split(sizes), strict=True):
        # Integers, so that ranks and orders of summation cannot disagree about a sign.
        direction = (total.sum() - total * router.cfg.num_experts).sign()
        router.e_score_correction_bias += router.cfg.bias_update_rate * direction * (1 - skip)
        router.load = total
        router.tokens_per_expert.zero_()


def max_violations(model: nn.Module) -> dict[str, Tensor]:
    """Return, per router, how far its busiest expert was above the mean load in the newest balanced step.

    Returns:
        Module name to FP32 scalar on the device, (largest load) / (mean load) - 1; empty before the first step.
    """
    return {
        name: module.load.max() * module.cfg.num_experts / module.load.sum() - 1
        for name, module in model.named_modules()
        if isinstance(module, Router) and module.load is not None
    }


def _keep(counts: Tensor) -> Tensor:
    return counts


def _count(experts: Tensor, *, num_experts: int) -> Tensor:
    """Return how often each expert was chosen, [E] int64; bincount would wait for the device."""
    return torch.zeros(num_experts, dtype=torch.int64, device=experts.device).scatter_add_(
        0, experts.flatten(), torch.ones_like(experts.flatten())
    )
