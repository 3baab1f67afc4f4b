"""When checkpoints are saved and how many are kept."""

from dataclasses import dataclass

from nvfp4_train.config.problem import check, not_negative


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """Checkpoint policy; a checkpoint is always saved at the end of a run.

    Args:
        interval_steps: Steps between saves; 0 saves at the end only.
        keep_last: Newest complete checkpoints that are kept; 0 keeps all.
    """

    interval_steps: int
    keep_last: int

    def __post_init__(self) -> None:
        check(self, *not_negative(self, "interval_steps", "keep_last"))
