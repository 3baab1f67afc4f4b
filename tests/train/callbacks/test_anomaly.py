import math

import pytest
from torch import nn

from nvfp4_train.train.anomaly import NonFiniteError
from nvfp4_train.train.callbacks.anomaly import StopOnNonFinite
from nvfp4_train.train.evaluate import ValidationLosses
from tests.support.fake_engine import FakeEngine, Recorder, fake_trainer


def broken_engine(**values: float) -> FakeEngine:
    """The embedding has NaN in all rows, as a poisoned checkpoint would."""
    embedding = nn.Embedding(16, 8)
    nn.init.constant_(embedding.weight, math.nan)
    return FakeEngine(model=nn.Sequential(embedding), **values)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"loss": math.nan}, "training loss nan, gradient norm 1.0"),
        ({"grad_norm": math.inf}, "training loss 10.0, gradient norm inf"),
    ],
)
def test_a_step_that_is_not_finite_ends_the_run(values: dict[str, float], told: str):
    recorder = Recorder()
    trainer = fake_trainer(StopOnNonFinite(), recorder, engine=broken_engine(**values))
    with pytest.raises(NonFiniteError) as error:
        trainer.fit(evaluate_first=False)
    assert str(error.value).startswith(f"step 1: {told}\n    first in the forward pass: 0, operand weight\n")
    assert recorder.events == [("run_started", 0)]  # neither logged nor saved


@pytest.mark.parametrize(("recipe", "bf16"), [(math.nan, 1.0), (1.0, math.inf)])
def test_a_validation_loss_that_is_not_finite_ends_the_run(recipe: float, bf16: float):
    trainer = fake_trainer(engine=broken_engine())
    with pytest.raises(NonFiniteError, match=r"after step 0: validation loss .*\n.*: 0, operand weight"):
        StopOnNonFinite().evaluation_ended(trainer, ValidationLosses(recipe=recipe, bf16=bf16))


def test_a_finite_run_goes_through():
    engine = FakeEngine()
    fake_trainer(StopOnNonFinite(), engine=engine).fit(evaluate_first=True)
    assert engine.step == 3
