"""Optimizers. Each leaf class is one ``type`` of the ``optimizer`` group."""

from dataclasses import dataclass
from enum import StrEnum

from nvfp4_train.config.problem import Rule, check, not_negative, positive


class WeightDecayShape(StrEnum):
    """How weight decay goes from its value at token 0 to its value at the end."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    """What every optimizer has.

    Args:
        weight_decay: Decoupled decay of matrices at the end of the run; norms, biases and Mamba's per-head scalars
            have none.
        weight_decay_start: The same at token 0.
        weight_decay_shape: The way between the two.
        clip_grad_norm: Largest global gradient norm; 0 does not clip.
    """

    weight_decay: float
    weight_decay_start: float
    weight_decay_shape: WeightDecayShape
    clip_grad_norm: float


@dataclass(kw_only=True, slots=True)
class AdamWConfig(OptimizerConfig):
    """AdamW on FP32 masters."""

    beta1: float
    beta2: float
    eps: float

    def __post_init__(self) -> None:
        published = "the published runs use 0.9 and 0.95"
        check(
            self,
            Rule("beta1", lambda: 0 <= self.beta1 < 1, "must lie in [0, 1)", published),
            Rule("beta2", lambda: 0 <= self.beta2 < 1, "must lie in [0, 1)", published),
            Rule(
                "weight_decay_start",
                lambda: (
                    self.weight_decay_shape is not WeightDecayShape.constant
                    or self.weight_decay_start == self.weight_decay
                ),
                f"must equal weight_decay ({self.weight_decay}) where weight_decay_shape is constant",
                "optimizer.weight_decay_shape=linear ramps between the two",
            ),
            *not_negative(self, "weight_decay", "weight_decay_start", "clip_grad_norm"),
            *positive(self, "eps"),  # 0 makes NaN of every weight without a gradient, such as unused embeddings
        )
