"""Where a training run is: what the random bytes of a rounding and the freshness of a quantized weight depend on."""

from dataclasses import dataclass


@dataclass(kw_only=True)
class RoundingPosition:
    """The one mutable runtime object of the precision pass, shared by reference by every QuantizedLinear of a model.

    The engine moves it: `start_microbatch` before each microbatch's forward, `weights_changed` after each optimizer
    step and each load of a checkpoint. A forward copies what its backward needs, so a backward may run after the
    position has moved on.

    Args:
        seed: Seed of the run; part of every random stream.
        step: Optimizer step, from 0.
        row_offset: Position, in the step's global batch of B * S tokens, of the microbatch's first token.
        weight_version: Counts the changes of the weights. Quantized weights are kept while it stays the same: a
            counter of our own, because under FSDP2 `weight._version` is 0 for ever.
        high_precision: Whether forwards use the compute dtype instead of the recipe; see `high_precision`.
    """

    seed: int
    step: int = 0
    row_offset: int = 0
    weight_version: int = 0
    high_precision: bool = False

    def start_microbatch(self, *, step: int, row_offset: int) -> None:
        """Move to a microbatch: its optimizer step, and the global row of its first token."""
        self.step = step
        self.row_offset = row_offset

    def weights_changed(self) -> None:
        """Say that the weights may have changed, so that the next forward quantizes them again."""
        self.weight_version += 1
