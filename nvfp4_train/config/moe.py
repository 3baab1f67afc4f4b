"""Mixture of experts: how tokens choose experts and how the load is balanced."""

from dataclasses import dataclass
from enum import StrEnum

from nvfp4_train.config.problem import Rule, check, not_negative, positive


class Activation(StrEnum):
    """Non-linearity of an MLP or an expert."""

    squared_relu = "squared_relu"
    swiglu = "swiglu"
    gelu = "gelu"


class RouterScore(StrEnum):
    """How a router turns a logit per expert into a score."""

    sigmoid = "sigmoid"  # each expert by itself
    softmax = "softmax"  # over all experts


@dataclass(kw_only=True, slots=True)
class MoeConfig:
    """A mixture-of-experts block: ``top_k`` of ``num_experts`` MLPs per token, and shared ones that see every token.

    Experts are chosen by score plus a correction that is not trained, and weighted by the score alone.

    Args:
        num_experts: Routed experts.
        top_k: Routed experts per token.
        d_ff: Width of a routed expert.
        shared_d_ff: Width of all shared experts together; 0: none.
        d_latent: Width in which routed experts work, projected to and from d_model once per token; 0: d_model.
        activation: Of routed and shared experts.
        score: How logits become scores.
        num_groups: Groups of experts for group-limited choice; 1: no groups.
        top_groups: Groups that a token may choose from: those with the highest sums of their two best experts.
        normalize_weights: Whether the scores of a token's experts are divided by their sum.
        routed_scaling: Factor on the output of the routed experts.
        bias_update_rate: Step of the correction after each optimizer step, up for experts below the mean load and down
            for those above; 0: no such balancing.
        auxiliary_loss_weight: Weight of the load-balancing loss; 0: none.
        z_loss_weight: Weight of the mean squared log-sum-exp of the logits; 0: none.
    """

    num_experts: int
    top_k: int
    d_ff: int
    shared_d_ff: int
    d_latent: int
    activation: Activation
    score: RouterScore
    num_groups: int
    top_groups: int
    normalize_weights: bool
    routed_scaling: float
    bias_update_rate: float
    auxiliary_loss_weight: float
    z_loss_weight: float

    def __post_init__(self) -> None:
        check(
            self,
            *positive(self, "num_experts", "top_k", "d_ff", "num_groups", "top_groups", "routed_scaling"),
            *not_negative(
                self, "shared_d_ff", "d_latent", "bias_update_rate", "auxiliary_loss_weight", "z_loss_weight"
            ),
            Rule(
                "num_experts",
                lambda: self.num_groups <= 0 or self.num_experts % self.num_groups == 0,
                lambda: f"must be a multiple of num_groups ({self.num_groups})",
                "change num_experts or num_groups",
            ),
            Rule(
                "top_groups",
                lambda: self.top_groups <= self.num_groups,
                lambda: f"must not be above num_groups ({self.num_groups})",
                "lower top_groups",
            ),
            Rule(
                "top_k",
                lambda: self.num_groups <= 0 or self.top_k * self.num_groups <= self.num_experts * self.top_groups,
                "must not be above the number of experts that a token may choose from",
                "lower top_k, or raise num_experts or top_groups",
            ),
        )
