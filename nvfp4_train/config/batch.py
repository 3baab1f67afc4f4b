"""How many tokens make a step."""

from dataclasses import dataclass

from nvfp4_train.config.problem import Rule, check, not_negative, positive


@dataclass(kw_only=True, slots=True)
class RampConfig:
    """Batch-size ramp-up over ``tokens`` tokens: from ``start`` sequences, ``increment`` more at equal token intervals.

    ``tokens: 0`` means no ramp-up.
    """

    start: int
    increment: int
    tokens: int

    def __post_init__(self) -> None:
        sizes = positive(self, "start", "increment") if getattr(self, "tokens", 0) else []
        check(self, *not_negative(self, "tokens"), *sizes)


@dataclass(kw_only=True, slots=True)
class BatchConfig:
    """Sizes of a step.

    Args:
        sequence_length: Tokens of one sequence.
        micro_batch_size: Sequences in one forward pass on one rank.
        global_batch_size: Sequences of one optimizer step over all ranks.
        ramp: Batch-size ramp-up.
    """

    sequence_length: int
    micro_batch_size: int
    global_batch_size: int
    ramp: RampConfig

    def __post_init__(self) -> None:
        check(
            self,
            *positive(self, "sequence_length", "micro_batch_size", "global_batch_size"),
            Rule(
                "global_batch_size",
                lambda: self._is_multiple(self.global_batch_size),
                self._multiple_rule,
                "change one of the two",
            ),
            Rule(
                "ramp.start",
                lambda: not self.ramp.tokens or self._is_multiple(self.ramp.start),
                self._multiple_rule,
                "change one of the two",
            ),
            Rule(
                "ramp.increment",
                lambda: not self.ramp.tokens or self._is_multiple(self.ramp.increment),
                self._multiple_rule,
                "change one of the two",
            ),
            Rule(
                "ramp.start",
                lambda: not self.ramp.tokens or self.ramp.start <= self.global_batch_size,
                lambda: f"must not be above global_batch_size ({self.global_batch_size})",
                "lower ramp.start",
            ),
            Rule(
                "ramp.increment",
                lambda: not self.ramp.tokens or self._ramp_is_even(),
                lambda: f"must divide global_batch_size - ramp.start ({self.global_batch_size - self.ramp.start})",
                "change ramp.start or ramp.increment",
            ),
        )

    @property
    def tokens(self) -> int:
        """Tokens of a step after ramp-up."""
        return self.global_batch_size * self.sequence_length

    def step_sizes(self) -> list[int]:
        """Return the sequences of every step that differs in them, first step first."""
        if not self.ramp.tokens or self.ramp.increment <= 0:
            return [self.global_batch_size]
        return [*range(self.ramp.start, self.global_batch_size, self.ramp.increment), self.global_batch_size]

    def _is_multiple(self, size: int) -> bool:
        return self.micro_batch_size <= 0 or size % self.micro_batch_size == 0

    def _multiple_rule(self) -> str:
        return f"must be a multiple of micro_batch_size ({self.micro_batch_size})"

    def _ramp_is_even(self) -> bool:
        return self.ramp.increment <= 0 or (self.global_batch_size - self.ramp.start) % self.ramp.increment == 0
