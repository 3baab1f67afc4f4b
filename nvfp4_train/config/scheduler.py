"""Learning-rate schedules, functions of tokens. Each leaf class is one ``type`` of the ``scheduler`` group."""

from dataclasses import dataclass
from enum import StrEnum

from nvfp4_train.config.problem import Rule, check, not_negative, positive


class DecayShape(StrEnum):
    """Shape of the last phase of warmup-stable-decay."""

    linear = "linear"
    cosine = "cosine"
    exponential = "exponential"
    minus_sqrt = "minus_sqrt"


@dataclass(kw_only=True, slots=True)
class SchedulerConfig:
    """What every schedule has; the schedule ends at ``run.tokens``.

    Args:
        max_lr: Learning rate after warm-up.
        warmup_init_lr: Learning rate at token 0.
        warmup_tokens: Length of the linear warm-up.
    """

    max_lr: float
    warmup_init_lr: float
    warmup_tokens: int


@dataclass(kw_only=True, slots=True)
class DecayingSchedulerConfig(SchedulerConfig):
    """What every schedule has that decays.

    Args:
        min_lr: Learning rate at the end.
    """

    min_lr: float


def scheduler_rules(cfg: SchedulerConfig) -> list[Rule]:
    """Rules for the fields that every schedule has."""
    return [
        *positive(cfg, "max_lr"),
        Rule(
            "warmup_init_lr",
            lambda: 0 <= cfg.warmup_init_lr <= cfg.max_lr,
            lambda: f"0 <= warmup_init_lr <= max_lr ({cfg.max_lr})",
            "use 0",
        ),
        *not_negative(cfg, "warmup_tokens"),
    ]


def decay_rules(cfg: DecayingSchedulerConfig) -> list[Rule]:
    """Rules for the fields that every schedule has that decays."""
    low_enough = Rule(
        "min_lr", lambda: 0 <= cfg.min_lr <= cfg.max_lr, lambda: f"0 <= min_lr <= max_lr ({cfg.max_lr})", "lower min_lr"
    )
    return [*scheduler_rules(cfg), low_enough]


@dataclass(kw_only=True, slots=True)
class WsdConfig(DecayingSchedulerConfig):
    """Warm-up, stable, decay over the last ``decay_fraction`` of the run."""

    decay_fraction: float
    decay_shape: DecayShape

    def __post_init__(self) -> None:
        check(
            self,
            *decay_rules(self),
            Rule(
                "decay_fraction",
                lambda: 0 <= self.decay_fraction <= 1,
                "must lie between 0 and 1",
                "the published runs use 0.15 to 0.2",
            ),
        )


@dataclass(kw_only=True, slots=True)
class CosineConfig(DecayingSchedulerConfig):
    """Warm-up, then half a cosine to ``min_lr``."""

    def __post_init__(self) -> None:
        check(self, *decay_rules(self))


@dataclass(kw_only=True, slots=True)
class LinearConfig(DecayingSchedulerConfig):
    """Warm-up, then a straight line to ``min_lr``."""

    def __post_init__(self) -> None:
        check(self, *decay_rules(self))


@dataclass(kw_only=True, slots=True)
class ConstantConfig(SchedulerConfig):
    """Warm-up, then ``max_lr``."""

    def __post_init__(self) -> None:
        check(self, *scheduler_rules(self))


@dataclass(kw_only=True, slots=True)
class InverseSqrtConfig(DecayingSchedulerConfig):
    """Warm-up, then ``max_lr * sqrt(warmup_tokens / tokens)``, not below ``min_lr``."""

    def __post_init__(self) -> None:
        check(self, *decay_rules(self))
