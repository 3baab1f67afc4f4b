"""When the validation loss is taken."""

from dataclasses import dataclass

from nvfp4_train.config.problem import check, not_negative, positive


@dataclass(kw_only=True, slots=True)
class EvaluationConfig:
    """Validation runs before the first step, every ``interval_steps`` and at the end, with the recipe on and in BF16.

    Args:
        interval_steps: Steps between evaluations; 0 evaluates at the start and the end only.
        num_sequences: Sequences of the validation set that are read, the same ones each time.
    """

    interval_steps: int
    num_sequences: int

    def __post_init__(self) -> None:
        check(self, *not_negative(self, "interval_steps"), *positive(self, "num_sequences"))
