import math
from pathlib import Path

import pytest
from torch import nn

from nvfp4_train.checkpoint.folder import mark_complete
from nvfp4_train.config.checkpoint import CheckpointConfig
from nvfp4_train.train.anomaly import NonFiniteError
from nvfp4_train.train.callbacks.checkpointing import Checkpointing
from nvfp4_train.train.metrics import Stopwatch
from nvfp4_train.train.state import TrainState
from nvfp4_train.train.trainer import Trainer
from tests.support.fake_engine import FakeEngine, fake_pace, fake_trainer, step_result


class SavingEngine(FakeEngine):
    """Leaves empty but complete checkpoints."""

    def save(self, path: Path, metadata: dict) -> None:
        super().save(path, metadata)
        path.mkdir(parents=True)
        mark_complete(path)


def trainer_that_saves(folder: Path, *, interval: int, keep: int = 0, state: TrainState | None = None) -> Trainer:
    callback = Checkpointing(
        CheckpointConfig(interval_steps=interval, keep_last=keep),
        folder=folder,
        metadata={"config": {"a": 1}},
        start_step=state.step if state else -1,
    )
    return fake_trainer(callback, engine=SavingEngine(), pace=fake_pace(steps=5), state=state)


def saved(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in folder.iterdir())


@pytest.mark.parametrize(("interval", "steps"), [(2, [2, 4, 5]), (5, [5]), (0, [5]), (1, [1, 2, 3, 4, 5])])
def test_it_saves_every_interval_and_at_the_end(tmp_path: Path, interval: int, steps: list[int]):
    trainer_that_saves(tmp_path, interval=interval).fit(evaluate_first=False)
    assert saved(tmp_path) == steps


def test_only_the_newest_are_kept(tmp_path: Path):
    trainer_that_saves(tmp_path, interval=1, keep=2).fit(evaluate_first=False)
    assert saved(tmp_path) == [4, 5]


def test_a_checkpoint_records_where_the_run_stands(tmp_path: Path):
    trainer = trainer_that_saves(tmp_path, interval=0)
    trainer.fit(evaluate_first=False)
    state = {"step": 5, "tokens": 40, "sequences": 10}
    metadata = {"config": {"a": 1}, "train_state": state, "data": {"sources": {"fake": 40}}}
    assert ("save", "step_00000005", metadata) in trainer.engine.calls  # type: ignore[attr-defined]


def test_nothing_is_saved_twice(tmp_path: Path):
    state = TrainState(step=5, tokens=40, sequences=10)
    trainer_that_saves(tmp_path, interval=2, state=state).fit(evaluate_first=False)
    assert saved(tmp_path) == []


def test_saving_is_no_training_time(tmp_path: Path):
    now = [0.0]

    class SlowDisk(SavingEngine):
        def save(self, path: Path, metadata: dict) -> None:
            now[0] += 50
            super().save(path, metadata)

    trainer = trainer_that_saves(tmp_path, interval=1)
    trainer.engine = SlowDisk()
    trainer.stopwatch = Stopwatch(lambda: now[0])
    trainer.fit(evaluate_first=False)
    assert trainer.stopwatch.seconds == 0


@pytest.mark.parametrize(
    ("value", "others", "told"), [(math.inf, 0, "weight"), (1.0, 1, "a parameter on another rank")]
)
def test_poisoned_weights_are_not_saved(tmp_path: Path, value: float, others: float, told: str):
    trainer = trainer_that_saves(tmp_path, interval=1)
    trainer.engine.model = nn.Linear(2, 2)
    nn.init.constant_(trainer.engine.model.weight, value)
    trainer.engine.mesh.others = others  # type: ignore[attr-defined]
    trainer.step()
    with pytest.raises(NonFiniteError, match=f"step 1: {told} is not finite after the update"):
        trainer.callbacks[0].step_ended(trainer, step_result())
    assert saved(tmp_path) == []
