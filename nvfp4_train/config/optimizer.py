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


class StateDtype(StrEnum):
    """What an optimizer keeps its moments in; updates are computed in FP32 in any case."""

    fp32 = "fp32"
    bf16 = "bf16"  # half the memory, rounded to nearest after every step


class StateOffload(StrEnum):
    """Where an optimizer keeps its moments between steps."""

    none = "none"  # beside the parameters
    cpu = "cpu"  # in the host's memory, fetched and returned in every step


class UpdateScale(StrEnum):
    """What an orthogonal update of an [rows, columns] matrix is multiplied by."""

    spectral = "spectral"  # sqrt(max(1, rows / columns)): a spectral norm that suits the change of width
    adamw_rms = "adamw_rms"  # 0.2 sqrt(max(rows, columns)): the root mean square of AdamW's updates, and its lr


@dataclass(kw_only=True, slots=True)
class MomentsConfig(OptimizerConfig):
    """What the optimizers have that keep AdamW's moments of some parameters, or of all.

    Args:
        beta1: Decay of the first moment.
        beta2: Decay of the second.
        eps: Added to the root of the second.
        state_dtype: What all moments are kept in.
        state_offload: Where they are kept between steps.
    """

    beta1: float
    beta2: float
    eps: float
    state_dtype: StateDtype
    state_offload: StateOffload


@dataclass(kw_only=True, slots=True)
class AdamWConfig(MomentsConfig):
    """AdamW on FP32 masters."""

    def __post_init__(self) -> None:
        check(self, *_moment_rules(self))


@dataclass(kw_only=True, slots=True)
class MuonConfig(MomentsConfig):
    """Muon for the matrices of the blocks; AdamW for embeddings, output head, norms, convolutions and Mamba's scalars.

    Args:
        momentum: Decay of the matrices' momentum (Nesterov).
        newton_schulz_steps: Iterations of the orthogonalization.
        orthogonalize_dtype: What its products are computed in.
        update_scale: What an orthogonal update is multiplied by.
    """

    momentum: float
    newton_schulz_steps: int
    orthogonalize_dtype: StateDtype
    update_scale: UpdateScale

    def __post_init__(self) -> None:
        check(
            self,
            *_moment_rules(self),
            Rule("momentum", lambda: 0 <= self.momentum < 1, "must lie in [0, 1)", "the published value is 0.95"),
            *positive(self, "newton_schulz_steps"),
        )


def _moment_rules(cfg: MomentsConfig) -> list[Rule]:
    published = "the published runs use 0.9 and 0.95"
    return [
        Rule("beta1", lambda: 0 <= cfg.beta1 < 1, "must lie in [0, 1)", published),
        Rule("beta2", lambda: 0 <= cfg.beta2 < 1, "must lie in [0, 1)", published),
        Rule(
            "weight_decay_start",
            lambda: (
                cfg.weight_decay_shape is not WeightDecayShape.constant or cfg.weight_decay_start == cfg.weight_decay
            ),
            f"must equal weight_decay ({cfg.weight_decay}) where weight_decay_shape is constant",
            "optimizer.weight_decay_shape=linear ramps between the two",
        ),
        *not_negative(cfg, "weight_decay", "weight_decay_start", "clip_grad_norm"),
        *positive(cfg, "eps"),  # 0 makes NaN of every weight without a gradient, such as unused embeddings
    ]
