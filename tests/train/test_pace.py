from dataclasses import replace

import pytest

from nvfp4_train.config.batch import RampConfig
from nvfp4_train.train.state import TrainState
from tests.support.fake_engine import fake_pace


def at(step: int) -> TrainState:
    return TrainState(step=step, tokens=8 * step, sequences=2 * step)


def test_the_learning_rate_follows_the_tokens():
    pace = fake_pace(steps=4)
    assert [pace.learning_rate(at(step)) for step in range(4)] == [1.0, 0.75, 0.5, 0.25]


def test_the_run_is_over_when_the_tokens_are_used_up():
    pace = fake_pace(steps=3)
    assert [pace.is_over(at(step)) for step in range(5)] == [False, False, False, True, True]


def test_stop_after_steps_ends_a_run_early():
    pace = fake_pace(steps=3, stop_after_steps=2)
    assert [pace.is_over(at(step)) for step in range(4)] == [False, False, True, True]


@pytest.mark.parametrize(
    ("interval", "stop_after_steps", "due"), [(2, None, [2, 4, 5]), (0, None, [5]), (2, 3, [2, 3, 4, 5])]
)
def test_evaluations_come_every_interval_and_at_the_end(interval: int, stop_after_steps: int | None, due: list[int]):
    pace = fake_pace(steps=5, stop_after_steps=stop_after_steps, evaluation_interval=interval)
    assert [step for step in range(1, 6) if pace.is_evaluation_due(at(step))] == due


def test_the_batch_size_ramps_up():
    pace = fake_pace()
    ramp = RampConfig(start=1, increment=1, tokens=8)
    pace = replace(pace, batch=replace(pace.batch, ramp=ramp))
    assert [pace.num_sequences(TrainState(tokens=tokens)) for tokens in (0, 7, 8, 80)] == [1, 1, 2, 2]
