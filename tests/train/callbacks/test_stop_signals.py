import os
import signal
from collections.abc import Iterator

import pytest

from nvfp4_train.train.callback import Callback
from nvfp4_train.train.callbacks.stop_signals import StopSignals
from nvfp4_train.train.state import StepResult
from nvfp4_train.train.trainer import Trainer
from tests.support.fake_engine import FakeEngine, Recorder, fake_trainer


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Whatever a test leaves, the next one and pytest find the handlers as they were."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Send(Callback):
    """Sends a signal to this process in step 1."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number

    def step_ended(self, trainer: Trainer, result: StepResult) -> None:
        if trainer.state.step == 1:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_its_step_in_good_order(number: signal.Signals):
    signals, recorder = StopSignals(), Recorder()
    trainer = fake_trainer(Send(number), recorder, signals)
    trainer.fit(evaluate_first=False)
    assert signals.received is number
    assert trainer.stop_reason == f"asked to stop by {number.name}"
    assert recorder.events == [("run_started", 0), ("step_ended", 1), ("run_ended", 1)]


def test_a_second_signal_is_not_held_back():
    signals = StopSignals()
    signals.run_started(fake_trainer())
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_the_handlers_are_given_back():
    before = signal.getsignal(signal.SIGTERM)
    fake_trainer(StopSignals()).fit(evaluate_first=False)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_to_another_rank_stops_this_one_too():
    engine, signals = FakeEngine(), StopSignals()
    engine.mesh.others = 1.0
    trainer = fake_trainer(signals, engine=engine)
    trainer.fit(evaluate_first=False)
    assert trainer.state.step == 1
    assert signals.received is None
    assert trainer.stop_reason == "asked to stop by a signal to another rank"
