"""Validation: twice from the same weights, once as trained and once without quantization."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nvfp4_train.data.batch import Batch
from nvfp4_train.data.build import TEXT
from nvfp4_train.data.loader import ValidationSet
from nvfp4_train.engine.base import Engine, Forward


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationLosses:
    """Mean cross-entropy over all counted labels of the validation sequences.

    Args:
        recipe: As the recipe computes the forward pass.
        bf16: In the compute dtype, nothing quantized.
        by_name: The losses of each validation set that has a name.
    """

    recipe: float
    bf16: float
    by_name: "Mapping[str, ValidationLosses]" = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """Return the losses by metric key."""
        values = {"val/loss": self.recipe, "val/loss_bf16": self.bf16}
        for name, losses in self.by_name.items():
            values |= {f"val/{name}/loss": losses.recipe, f"val/{name}/loss_bf16": losses.bf16}
        return values


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """How the validation losses are taken: always from the same sequences, spread over all ranks.

    Args:
        validation: The held-out sets by name.
        num_sequences: Sequences that are read of each set.
        micro_batch_size: Sequences of one forward pass.
    """

    validation: Mapping[str, ValidationSet]
    num_sequences: int
    micro_batch_size: int

    def run(self, engine: Engine) -> ValidationLosses:
        """Take both losses of every set from the present weights; the loss of all is the mean over all labels."""
        sums = {(name, forward): self._sums(engine, name, forward) for name in self.validation for forward in Forward}
        names = list(self.validation)
        by_name = {name: _losses(sums, [name]) for name in names} if names != [TEXT] else {}
        return _losses(sums, names, by_name=by_name)

    def batches(self) -> Iterator[Batch]:
        """Yield this rank's microbatches of all sets, as many on every rank."""
        for name in self.validation:
            yield from self._batches(name)

    def _batches(self, name: str) -> Iterator[Batch]:
        return self.validation[name].batches(num_sequences=self.num_sequences, micro_batch_size=self.micro_batch_size)

    def _sums(self, engine: Engine, name: str, forward: Forward) -> Tensor:
        """Return [2] float64: the sum of the losses of a set, and the number of labels."""
        sums = [engine.evaluate(batch, forward=forward) for batch in self._batches(name)]
        return torch.stack([torch.stack([item.loss_sum.double(), item.num_labels.double()]) for item in sums]).sum(0)


def _losses(
    sums: Mapping[tuple[str, Forward], Tensor],
    names: list[str],
    *,
    by_name: Mapping[str, ValidationLosses] | None = None,
) -> ValidationLosses:
    def mean(forward: Forward) -> float:
        loss_sum, num_labels = torch.stack([sums[name, forward] for name in names]).sum(0)
        return (loss_sum / num_labels).item()

    return ValidationLosses(recipe=mean(Forward.recipe), bf16=mean(Forward.bf16), by_name=by_name or {})
