"""Where a training run is: what the random bytes of a rounding and the freshness of a quantized weight depend on."""

from dataclasses import dataclass

from nvfp4_train.numerics.random import RandomStream

_FORWARD_STATE = ("step", "row_offset", "segment", "stride", "high_precision")


@dataclass(kw_only=True)
class RoundingPosition:
    """The one mutable runtime object of the precision pass, shared by reference by every QuantizedLinear of a model.

    The engine moves it: `start_microbatch` before each microbatch's forward, `weights_changed` after each optimizer
    step and each load of a checkpoint. A forward copies what its backward needs, so a backward may run after the
    position has moved on.

    Args:
        seed: Seed of the run; part of every random stream.
        step: Optimizer step, from 0.
        row_offset: Position, in the step's global batch of B * S tokens, of the microbatch's first token held here.
        segment: Tokens held of each sequence, where this rank holds a slice of each only; 0 where it holds them whole.
        stride: Length S of the whole sequences then; else 0.
        weight_version: Counts the changes of the weights. Quantized weights are kept while it stays the same: a
            counter of our own, because under FSDP2 `weight._version` is 0 for ever.
        high_precision: Whether forwards use the compute dtype instead of the recipe; see `high_precision`.
    """

    seed: int
    step: int = 0
    row_offset: int = 0
    segment: int = 0
    stride: int = 0
    weight_version: int = 0
    high_precision: bool = False

    def start_microbatch(self, *, step: int, row_offset: int, segment: int = 0, stride: int = 0) -> None:
        """Move to a microbatch: its optimizer step, and the global rows of its tokens.

        Local token r is the global row ``row_offset + (r // segment) * stride + r % segment``; with segment 0,
        ``row_offset + r``.

        Args:
            step: Optimizer step, from 0.
            row_offset: Global row of the first token held here.
            segment: Tokens held of each sequence, if this rank holds a slice of each: a multiple of 16 that divides
                the sequence.
            stride: Length of the whole sequences then.

        Raises:
            ValueError: for segments that the random streams could not follow.
        """
        RandomStream(0, row_segment=segment, row_stride=stride, column_segment=segment, column_stride=stride)
        self.step, self.row_offset, self.segment, self.stride = step, row_offset, segment, stride

    def snapshot(self) -> dict[str, int | bool]:
        """Return what a forward started now depends on, for `restore`: plain values.

        Without the version of the weights, which only ever grows.
        """
        return {name: getattr(self, name) for name in _FORWARD_STATE}

    def restore(self, snapshot: dict[str, int | bool]) -> None:
        """Go back to a snapshot, so that a forward that is computed again rounds as it did the first time."""
        for name in _FORWARD_STATE:
            setattr(self, name, snapshot[name])

    def weights_changed(self) -> None:
        """Say that the weights may have changed, so that the next forward quantizes them again."""
        self.weight_version += 1
