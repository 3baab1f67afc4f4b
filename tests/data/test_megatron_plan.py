import numpy as np

from nvfp4_train.data import megatron_plan
from nvfp4_train.data.megatron_order import blend_index
from nvfp4_train.data.megatron_plan import MegatronPlan


def test_it_says_what_the_indices_say(monkeypatch):
    monkeypatch.setattr(megatron_plan, "_BLOCK", 16)
    sources, indices = blend_index([0.5, 0.3, 0.2], 100)
    plan = MegatronPlan(sources, indices, num_sources=3)
    assert plan.end == 100
    for position in range(101):
        assert plan.given(position).tolist() == np.bincount(sources[:position], minlength=3).tolist()
    picks = plan.picks(37, 20)
    assert picks.sources.tolist() == sources[37:57].tolist()
    assert picks.indices.tolist() == indices[37:57].tolist()
    assert picks.sources.dtype == np.int64
