"""Optimizers. Each leaf class is one ``type`` of the ``optimizer`` group."""

from dataclasses import dataclass

from nvfp4_train.config.problem import Rule, check, not_negative


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    """What every optimizer has.

    Args:
        weight_decay: Decoupled decay of matrices; norms, biases and Mamba's per-head scalars have none.
        clip_grad_norm: Largest global gradient norm; 0 does not clip.
    """

    weight_decay: float
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
            *not_negative(self, "weight_decay", "clip_grad_norm", "eps"),
        )
