"""What DeepSpeed keeps, by hand, from what its source allocates."""

from dataclasses import replace

import pytest

from nvfp4_train.analysis.plan.calibration import load_efficiency
from nvfp4_train.analysis.plan.hardware import load_hardware
from nvfp4_train.analysis.plan.layout import filled, layout_of
from nvfp4_train.analysis.plan.memory import Memory
from nvfp4_train.analysis.plan.planner import Planner
from nvfp4_train.analysis.plan.search import search
from nvfp4_train.analysis.plan.step_time import Machine
from tests.support.configs import composed

RANKS = 4


def planned(*options: str) -> tuple[Planner, Memory]:
    cfg = composed("experiment=demo", "engine=deepspeed", "batch.micro_batch_size=1", *options)
    machine = Machine(hardware=load_hardware("H100"), efficiency=load_efficiency())
    planner = Planner(
        model=cfg.model, recipe=cfg.recipe, optimizer=cfg.optimizer, machine=machine, total_tokens=cfg.run.tokens
    )
    return planner, planner.memory_of(filled(layout_of(cfg), devices=RANKS))


PLANNER, FIRST = planned("engine.zero_stage=1")
WHOLE = sum(parameter.numel() for parameter in PLANNER.built.model.parameters())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_stage_shards_masters_and_optimizer_state(stage: int):
    _, found = planned(f"engine.zero_stage={stage}")
    assert found.masters == pytest.approx(4 * WHOLE / RANKS, rel=1e-3)
    assert found.optimizer == pytest.approx(8 * WHOLE / RANKS, rel=1e-3)
    assert found.host == 0


def test_each_stage_shards_more():
    second, third = (planned(f"engine.zero_stage={stage}")[1] for stage in (2, 3))
    assert FIRST.accumulated_gradients == pytest.approx(4 * WHOLE, rel=1e-3)
    assert second.accumulated_gradients < FIRST.accumulated_gradients / 4
    assert second.gathered_weights == FIRST.gathered_weights == pytest.approx(4 * WHOLE, rel=1e-3)
    _, sharded = planned("engine.zero_stage=3", "engine.prefetch_bucket_size=1")
    assert sharded.gathered_weights < third.gathered_weights <= 4 * WHOLE


def test_what_is_offloaded_is_on_the_host():
    _, found = planned("engine.zero_stage=3", "engine.offload_optimizer=cpu", "engine.offload_param=cpu")
    assert found.masters == found.optimizer == found.gradients == 0
    assert found.host == pytest.approx((4 + 4 + 8 + 4) * WHOLE / RANKS, rel=1e-3)
    _, shards_here = planned("engine.zero_stage=3", "engine.offload_optimizer=cpu")
    assert shards_here.gathered_weights - found.gathered_weights == found.host - shards_here.host


def test_buckets_are_as_large_as_configured():
    _, small = planned("engine.zero_stage=2", "engine.reduce_bucket_size=1000", "engine.overlap_comm=true")
    assert small.communication == 2 * 4 * 1000
    assert FIRST.communication >= 4 * 500_000_000


def test_a_search_keeps_the_engine():
    cfg = composed("experiment=demo", "engine=deepspeed", "engine.zero_stage=2")
    found = search(PLANNER, layout_of(cfg), devices=RANKS)
    assert found.plans
    for plan in found.plans:
        assert plan.layout.zero is not None
        assert replace(plan.layout, dp_shard=1).devices == 1
        assert plan.layout.dp_shard == RANKS
