from nvfp4_train.train.callback import Callback
from tests.support.fake_engine import FakeEngine, fake_trainer


def test_a_callback_without_methods_of_its_own_changes_nothing():
    with_it, without_it = FakeEngine(), FakeEngine()
    fake_trainer(Callback(), engine=with_it).fit(evaluate_first=True)
    fake_trainer(engine=without_it).fit(evaluate_first=True)
    assert with_it.calls == without_it.calls
