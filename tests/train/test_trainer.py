from nvfp4_train.train.callback import Callback
from nvfp4_train.train.state import StepResult, TrainState
from nvfp4_train.train.trainer import Trainer
from tests.support.fake_engine import FakeEngine, Recorder, fake_pace, fake_trainer


def test_callbacks_hear_of_everything_in_order():
    recorder = Recorder()
    fake_trainer(recorder, pace=fake_pace(steps=3, evaluation_interval=2)).fit(evaluate_first=True)
    assert recorder.events == [
        ("evaluation_ended", 0),
        ("run_started", 0),
        ("step_ended", 1),
        ("evaluation_ended", 2),
        ("step_ended", 2),
        ("evaluation_ended", 3),
        ("step_ended", 3),
        ("run_ended", 3),
    ]


def test_a_resumed_run_does_not_evaluate_again():
    recorder = Recorder()
    state = TrainState(step=2, tokens=16, sequences=4)
    fake_trainer(recorder, state=state).fit(evaluate_first=False)
    assert recorder.events == [
        ("run_started", 2),
        ("evaluation_ended", 3),
        ("step_ended", 3),
        ("run_ended", 3),
    ]


def test_a_step_reads_on_where_the_state_stands():
    engine = FakeEngine()
    trainer = fake_trainer(engine=engine, state=TrainState(step=1, tokens=8, sequences=6))
    result = trainer.step()
    # two rows of four tokens, of which the last one has no label
    assert engine.calls == [("forward_backward", [0, 1], 6.0), ("optimizer_step", result.lr, 0.1)]
    assert [int(batch.tokens[0, 0]) for batch in result.batches] == [6, 7]
    assert result.lr == 1 - 8 / 24
    assert trainer.state == TrainState(step=2, tokens=16, sequences=8)


def test_labels_are_counted_over_all_ranks():
    engine = FakeEngine()
    engine.mesh.others = 6.0
    result = fake_trainer(engine=engine).step()
    assert float(result.denominator) == 12.0
    assert engine.calls[0] == ("forward_backward", [0, 1], 12.0)


def test_weights_are_evaluated_twice_before_and_after():
    engine = FakeEngine()
    fake_trainer(engine=engine, pace=fake_pace(steps=1)).fit(evaluate_first=True)
    evaluation = [("evaluate", forward, row) for forward in ("recipe", "bf16") for row in (0, 1)]
    assert engine.calls[:4] == evaluation
    assert engine.calls[-4:] == evaluation


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def step_ended(self, trainer: Trainer, result: StepResult) -> None:
        if trainer.state.step == self.step:
            trainer.stop("because")


def test_a_callback_stops_a_run_after_its_step():
    recorder = Recorder()
    trainer = fake_trainer(StopAt(1), recorder)
    trainer.fit(evaluate_first=False)
    assert trainer.stop_reason == "because"
    assert recorder.events == [("run_started", 0), ("step_ended", 1), ("run_ended", 1)]


def test_a_run_that_is_over_trains_nothing():
    recorder = Recorder()
    fake_trainer(recorder, state=TrainState(step=3, tokens=24)).fit(evaluate_first=False)
    assert recorder.events == [("run_started", 3), ("run_ended", 3)]
