from collections.abc import Mapping

import pytest

from nvfp4_train.train.callbacks.metrics_logging import MetricsLogging
from nvfp4_train.train.metrics import Stopwatch
from tests.support.fake_engine import FakeEngine, fake_pace, fake_trainer


class Rows:
    def __init__(self) -> None:
        self.rows: list[Mapping[str, int | float]] = []

    def write(self, row: Mapping[str, int | float]) -> None:
        self.rows.append(row)

    def close(self) -> None:
        raise AssertionError("whoever opened it closes it")


class SlowEngine(FakeEngine):
    """A step takes 2 seconds of the trainer's clock, an evaluation of a microbatch 100."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def optimizer_step(self, *, lr: float, weight_decay: float):
        self.now += 2
        return super().optimizer_step(lr=lr, weight_decay=weight_decay)

    def evaluate(self, batch, *, forward):
        self.now += 100
        return super().evaluate(batch, forward=forward)


def logged(*, steps: int, interval: int, evaluation_interval: int = 0) -> list[Mapping[str, int | float]]:
    sink, engine = Rows(), SlowEngine()
    pace = fake_pace(steps=steps, evaluation_interval=evaluation_interval)
    trainer = fake_trainer(MetricsLogging([sink], interval_steps=interval), engine=engine, pace=pace)
    trainer.stopwatch = Stopwatch(lambda: engine.now)
    trainer.fit(evaluate_first=True)
    return sink.rows


def test_a_row_has_what_others_rely_on():
    rows = logged(steps=2, interval=1)
    assert rows == [
        {"step": 0, "tokens": 0, "val/loss": 2.0, "val/loss_bf16": 1.0},
        {
            "step": 1,
            "tokens": 8,
            "train/loss": 10.0,
            "train/grad_norm": 1.0,
            "lr": 1.0,
            "tokens_per_second": 4.0,
            "data/fake/tokens": 8,
            "data/fake/epochs": 0.02,
            "precision/memory": 0,
        },
        {
            "step": 2,
            "tokens": 16,
            "train/loss": 9.0,
            "train/grad_norm": 1.0,
            "lr": 0.5,
            "tokens_per_second": 4.0,
            "data/fake/tokens": 16,
            "data/fake/epochs": 0.04,
            "precision/memory": 0,
            "val/loss": 2.0,
            "val/loss_bf16": 1.0,
        },
    ]


@pytest.mark.parametrize(
    ("interval", "evaluation_interval", "steps"),
    [(2, 0, [0, 2, 4, 5]), (3, 2, [0, 2, 3, 4, 5]), (9, 0, [0, 5])],
)
def test_rows_come_every_interval_and_where_it_is_evaluated(interval: int, evaluation_interval: int, steps: list[int]):
    rows = logged(steps=5, interval=interval, evaluation_interval=evaluation_interval)
    assert [row["step"] for row in rows] == steps


def test_throughput_covers_the_interval_and_leaves_evaluation_out():
    rows = logged(steps=6, interval=3, evaluation_interval=3)
    assert [row["tokens_per_second"] for row in rows[1:]] == [4.0, 4.0]


def test_other_ranks_write_nothing():
    trainer = fake_trainer(MetricsLogging([], interval_steps=1))
    trainer.fit(evaluate_first=True)
    assert trainer.state.step == 3
