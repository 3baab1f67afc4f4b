from collections.abc import Mapping

import pytest
import torch
from torch import nn

from nvfp4_train.model.peaks import Peak, Precision
from nvfp4_train.model.router import Router
from nvfp4_train.train.callbacks.metrics_logging import MetricsLogging
from nvfp4_train.train.metrics import Stopwatch
from nvfp4_train.train.utilization import Utilization
from tests.support.fake_engine import FakeEngine, fake_pace, fake_trainer
from tests.support.models import TINY_MOE

# 4 tokens per second make 2e12 FLOP/s on each of 2 devices, half in FP4: 0.25 + 0.125 of what they can do.
UTILIZATION = Utilization(
    flops_per_token={Precision.bf16: 5e11, Precision.fp4: 5e11},
    num_devices=2,
    peak=Peak(fp32=1e12, bf16=4e12, fp4=8e12),
)


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
    trainer = fake_trainer(
        MetricsLogging([sink], interval_steps=interval, utilization=UTILIZATION), engine=engine, pace=pace
    )
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
            "perf/model_tflops_per_device": 2.0,
            "perf/fp4_flops_share": 0.5,
            "perf/mfu": 0.375,
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
            "perf/model_tflops_per_device": 2.0,
            "perf/fp4_flops_share": 0.5,
            "perf/mfu": 0.375,
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
    trainer = fake_trainer(MetricsLogging([], interval_steps=1, utilization=UTILIZATION))
    trainer.fit(evaluate_first=True)
    assert trainer.state.step == 3


def make_router(load: list[int]) -> nn.Module:
    router = Router(TINY_MOE, d_model=4)
    router.load = torch.tensor(load)
    return router


def test_extra_losses_and_the_balance_of_experts_are_in_the_row():
    sink, engine = Rows(), SlowEngine()
    engine.extra_losses = {"mtp_1": torch.tensor(7.5), "router": torch.tensor(0.25)}
    engine.model = nn.ModuleDict(
        {
            "blocks": nn.ModuleList(
                nn.ModuleDict({"mixer": nn.ModuleDict({"router": make_router(load)})})
                for load in ([1] * 8, [4, 0, 0, 0, 1, 1, 1, 1])
            )
        }
    )
    trainer = fake_trainer(MetricsLogging([sink], interval_steps=1, utilization=UTILIZATION), engine=engine)
    trainer.stopwatch = Stopwatch(lambda: engine.now)
    trainer.fit(evaluate_first=False)
    row = sink.rows[0]
    assert row["train/mtp_1_loss"] == 7.5
    assert row["train/router_loss"] == 0.25
    assert row["moe/max_violation"] == row["moe/blocks.1/max_violation"] == 3.0
    assert row["moe/blocks.0/max_violation"] == 0.0
