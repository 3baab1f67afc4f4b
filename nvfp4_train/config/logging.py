"""What a run reports, and where."""

from dataclasses import dataclass
from enum import StrEnum

from nvfp4_train.config.problem import Rule, check, not_negative, positive


class WandbMode(StrEnum):
    """Weights & Biases."""

    off = "off"
    offline = "offline"
    online = "online"


@dataclass(kw_only=True, slots=True)
class ProfileConfig:
    """Window of the torch profiler: ``num_steps`` steps after ``start_step`` steps; 0 steps do not profile."""

    start_step: int
    num_steps: int

    def __post_init__(self) -> None:
        check(self, *not_negative(self, "start_step", "num_steps"))


@dataclass(kw_only=True, slots=True)
class LoggingConfig:
    """Metrics go to ``metrics.jsonl`` always.

    Args:
        interval_steps: Steps between metric rows.
        progress_bar: Whether the console shows a progress bar (where it is a terminal; plain lines otherwise).
        tensorboard: Whether TensorBoard event files are written.
        wandb: Whether and how Weights & Biases is used.
        wandb_project: Its project name.
        profile: The profiler's window.
    """

    interval_steps: int
    progress_bar: bool
    tensorboard: bool
    wandb: WandbMode
    wandb_project: str
    profile: ProfileConfig

    def __post_init__(self) -> None:
        check(
            self,
            *positive(self, "interval_steps"),
            Rule(
                "wandb_project",
                lambda: self.wandb is WandbMode.off or bool(self.wandb_project),
                "must name a project where wandb is used",
                "logging.wandb_project=nvfp4_train",
            ),
        )
