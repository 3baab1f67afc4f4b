"""What a run is called, where it lives and how long it lasts."""

from dataclasses import dataclass
from enum import StrEnum

from nvfp4_train.config.problem import Rule, check, not_negative, positive


class Device(StrEnum):
    """Device that a rank computes on."""

    auto = "auto"  # cuda where there is one
    cpu = "cpu"
    cuda = "cuda"


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """A run.

    Args:
        name: Folder below ``dir``; the experiment's name by default.
        dir: Folder of all runs.
        seed: Seed of initialization, data order and stochastic rounding.
        tokens: Training budget in tokens; schedules end here.
        stop_after_steps: Leave after this many steps in all, saving a checkpoint; schedules do not change. null runs to
            the end.
        device: Device that ranks compute on.
    """

    name: str
    dir: str
    seed: int
    tokens: int
    stop_after_steps: int | None
    device: Device

    def __post_init__(self) -> None:
        check(
            self,
            Rule(
                "name",
                lambda: self.name.isprintable() and "/" not in self.name and self.name[:1] not in ("", "."),
                "must be a plain folder name: not empty, without / and line breaks, and not starting with a dot",
                "run.name=my_run",
            ),
            Rule("dir", lambda: bool(self.dir), "must name a folder", "run.dir=runs"),
            *not_negative(self, "seed"),
            *positive(self, "tokens"),
            Rule(
                "stop_after_steps",
                lambda: self.stop_after_steps is None or self.stop_after_steps >= 1,
                "must be null or at least 1",
                "use null to run to the end",
            ),
        )
