"""Validation: twice from the same weights, once as trained and once without quantization."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from nvfp4_train.data.batch import Batch
from nvfp4_train.data.loader import ValidationSet
from nvfp4_train.engine.base import Engine, Forward


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationLosses:
    """Mean cross-entropy over all counted labels of the validation sequences.

    Args:
        recipe: As the recipe computes the forward pass.
        bf16: In the compute dtype, nothing quantized.
    """

    recipe: float
    bf16: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """How the validation losses are taken: always from the same sequences, spread over all ranks.

    Args:
        validation: The held-out set.
        num_sequences: Sequences that are read.
        micro_batch_size: Sequences of one forward pass.
    """

    validation: ValidationSet
    num_sequences: int
    micro_batch_size: int

    def run(self, engine: Engine) -> ValidationLosses:
        """Take both losses from the present weights."""
        return ValidationLosses(recipe=self._loss(engine, Forward.recipe), bf16=self._loss(engine, Forward.bf16))

    def batches(self) -> Iterator[Batch]:
        """Return this rank's microbatches, as many on every rank."""
        return self.validation.batches(num_sequences=self.num_sequences, micro_batch_size=self.micro_batch_size)

    def _loss(self, engine: Engine, forward: Forward) -> float:
        sums = [engine.evaluate(batch, forward=forward) for batch in self.batches()]
        loss_sum = torch.stack([item.loss_sum for item in sums]).sum(dtype=torch.float64)
        num_labels = torch.stack([item.num_labels for item in sums]).sum()
        return (loss_sum / num_labels).item()
