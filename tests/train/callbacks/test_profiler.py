import gzip
import json
from pathlib import Path

import pytest

from nvfp4_train.config.logging import ProfileConfig
from nvfp4_train.train.callback import Callback
from nvfp4_train.train.callbacks.profiler import Profiler
from tests.support.fake_engine import FakeEngine, fake_pace, fake_trainer


@pytest.mark.parametrize(
    ("start", "length", "profiled"), [(0, 1, [1]), (1, 2, [2, 3]), (3, 9, [4, 5])], ids=["first", "middle", "past_end"]
)
def test_the_window_holds_the_steps_that_it_names(tmp_path: Path, start: int, length: int, profiled: list[int]):
    import torch

    class MarkedEngine(FakeEngine):
        def optimizer_step(self, *, lr: float, weight_decay: float):
            with torch.profiler.record_function(f"update_{self.step + 1}"):
                return super().optimizer_step(lr=lr, weight_decay=weight_decay)

    callback = Profiler(ProfileConfig(start_step=start, num_steps=length), folder=tmp_path / "profile", rank=3)
    fake_trainer(callback, engine=MarkedEngine(), pace=fake_pace(steps=5)).fit(evaluate_first=False)
    trace = json.loads(gzip.decompress((tmp_path / "profile" / "rank_3.trace.json.gz").read_bytes()))
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {name for name in names if str(name).startswith("update_")} == {f"update_{step}" for step in profiled}
    assert f"update_{profiled[0]}" in (tmp_path / "profile" / "rank_3.txt").read_text()


def test_a_window_after_the_end_writes_nothing(tmp_path: Path):
    callback = Profiler(ProfileConfig(start_step=90, num_steps=1), folder=tmp_path / "profile", rank=0)
    fake_trainer(callback, Callback()).fit(evaluate_first=False)
    assert not (tmp_path / "profile").exists()
