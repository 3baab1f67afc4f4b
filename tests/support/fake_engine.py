"""An engine, a mesh and data that do nothing but remember what they were asked for."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nvfp4_train.config.batch import BatchConfig, RampConfig
from nvfp4_train.config.run import Device, RunConfig
from nvfp4_train.config.scheduler import LinearConfig
from nvfp4_train.data.batch import IGNORE_INDEX, Batch
from nvfp4_train.data.build import TEXT
from nvfp4_train.engine.base import Forward, LossSum
from nvfp4_train.train.callback import Callback
from nvfp4_train.train.evaluate import Evaluation, ValidationLosses
from nvfp4_train.train.pace import Pace
from nvfp4_train.train.state import StepResult, TrainState
from nvfp4_train.train.trainer import Trainer
from tests.support.tiny import tiny_optimizer

SEQUENCE_LENGTH = 4


@dataclass
class FakeMesh:
    """One rank; ``others`` is what the other ranks add to every sum."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    others: float = 0.0

    def sum_over_data(self, tensor: Tensor) -> Tensor:
        return tensor + self.others

    sum_over_ranks = sum_over_data

    def max_over_ranks(self, tensor: Tensor) -> Tensor:
        return tensor

    def degree(self, axis: str) -> int:
        return 1


class FakeEngine:
    """Losses count down from 10; ``calls`` lists what happened."""

    def __init__(self, *, loss: float = 10.0, grad_norm: float = 1.0, model: nn.Module | None = None) -> None:
        self.model = model or nn.Identity()
        self.mesh = FakeMesh()
        self.step = 0
        self.extra_losses: dict[str, Tensor] = {}
        self.calls: list[Any] = []
        self.loss = loss
        self.grad_norm = grad_norm

    def forward_backward(self, batches: list[Batch], denominator: Tensor) -> Tensor:
        self.calls.append(("forward_backward", [batch.microbatch_index for batch in batches], float(denominator)))
        return torch.tensor(self.loss - self.step)

    def optimizer_step(self, *, lr: float, weight_decay: float) -> Tensor:
        self.calls.append(("optimizer_step", lr, weight_decay))
        self.step += 1
        return torch.tensor(self.grad_norm)

    def evaluate(self, batch: Batch, *, forward: Forward) -> LossSum:
        self.calls.append(("evaluate", forward.value, int(batch.tokens[0, 0])))
        if isinstance(self.model, nn.Embedding | nn.Sequential):
            self.model(batch.tokens)
        loss = 2.0 if forward is Forward.recipe else 1.0
        return LossSum(loss_sum=loss * batch.num_labels().float(), num_labels=batch.num_labels())

    def save(self, path: Path, metadata: dict[str, Any]) -> None:
        self.calls.append(("save", path.name, metadata))

    def load(self, path: Path) -> dict[str, Any]:
        self.calls.append(("load", path.name))
        return {}

    def close(self) -> None:
        self.calls.append("close")


def fake_batch(first: int, *, index: int = 0) -> Batch:
    """One row whose first token is ``first`` and whose last label does not count."""
    tokens = torch.full((1, SEQUENCE_LENGTH), first)
    labels = tokens.clone()
    labels[:, -1] = IGNORE_INDEX
    zeros = torch.zeros_like(tokens)
    return Batch(tokens=tokens, labels=labels, document_ids=zeros.int(), position_ids=zeros, microbatch_index=index)


class FakeLoader:
    """Microbatches of one row; a row's tokens are its sequence's index."""

    def step_batches(self, *, first_sequence: int, num_sequences: int) -> list[Batch]:
        return [fake_batch(first_sequence + index, index=index) for index in range(num_sequences)]


class FakeData:
    """A loader, and a source called fake."""

    def __init__(self) -> None:
        self.loader = FakeLoader()

    def metrics(self, sequences: int) -> dict[str, float]:
        return {"data/fake/tokens": sequences * SEQUENCE_LENGTH, "data/fake/epochs": sequences / 100}

    def state(self, sequences: int) -> dict[str, object]:
        return {"sources": {"fake": sequences * SEQUENCE_LENGTH}}


class FakeValidation:
    """Two rows, the same each time."""

    def batches(self, *, num_sequences: int, micro_batch_size: int) -> Iterator[Batch]:
        yield from (fake_batch(index) for index in range(0, num_sequences, micro_batch_size))


class Recorder(Callback):
    """Lists what a callback is told, with the step at which it was told."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def run_started(self, trainer: Trainer) -> None:
        self.events.append(("run_started", trainer.state.step))

    def evaluation_ended(self, trainer: Trainer, losses: ValidationLosses) -> None:
        self.events.append(("evaluation_ended", trainer.state.step))

    def step_ended(self, trainer: Trainer, result: StepResult) -> None:
        self.events.append(("step_ended", trainer.state.step))

    def run_ended(self, trainer: Trainer) -> None:
        self.events.append(("run_ended", trainer.state.step))


def fake_pace(*, steps: int = 3, stop_after_steps: int | None = None, evaluation_interval: int = 0) -> Pace:
    """Steps of 2 sequences of 4 tokens; the rate goes from 1 to 0 over the run."""
    tokens = steps * 2 * SEQUENCE_LENGTH
    return Pace(
        run=RunConfig(
            name="fake", dir="runs", seed=1, tokens=tokens, stop_after_steps=stop_after_steps, device=Device.cpu
        ),
        batch=BatchConfig(
            sequence_length=SEQUENCE_LENGTH,
            micro_batch_size=1,
            global_batch_size=2,
            ramp=RampConfig(start=1, increment=1, tokens=0),
        ),
        scheduler=LinearConfig(max_lr=1.0, min_lr=0.0, warmup_init_lr=0.0, warmup_tokens=0),
        optimizer=tiny_optimizer(),
        evaluation_interval=evaluation_interval,
    )


def fake_trainer(
    *callbacks: Callback, engine: FakeEngine | None = None, pace: Pace | None = None, state: TrainState | None = None
) -> Trainer:
    """A trainer of fakes."""
    return Trainer(
        engine=engine or FakeEngine(),
        data=FakeData(),  # type: ignore[arg-type]
        evaluation=Evaluation(validation={TEXT: FakeValidation()}, num_sequences=2, micro_batch_size=1),  # type: ignore[dict-item]
        pace=pace or fake_pace(),
        state=state or TrainState(),
        callbacks=callbacks,
    )


def step_result(*, loss: float = 5.0, grad_norm: float = 1.0, lr: float = 0.5) -> StepResult:
    """What a step gave."""
    return StepResult(
        loss=torch.tensor(loss),
        grad_norm=torch.tensor(grad_norm),
        lr=lr,
        denominator=torch.tensor(6.0),
        batches=[fake_batch(3)],
    )
