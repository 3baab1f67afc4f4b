"""A search returns layouts that fit and are run as configured, best first, and says why others do not."""

from dataclasses import replace

import pytest

from nvfp4_train.analysis.plan.calibration import load_efficiency
from nvfp4_train.analysis.plan.communication import spans
from nvfp4_train.analysis.plan.hardware import Hardware, load_hardware
from nvfp4_train.analysis.plan.layout import layout_of
from nvfp4_train.analysis.plan.planner import Plan, Planner
from nvfp4_train.analysis.plan.search import Found, _cheapest_that_fits, search
from nvfp4_train.analysis.plan.step_time import Machine
from nvfp4_train.config.parallel import ActivationCheckpoint
from tests.support.configs import composed


def find(*overrides: str, devices: int, hardware: Hardware | None = None) -> tuple[Planner, Found]:
    cfg = composed(*overrides)
    machine = Machine(hardware=hardware or load_hardware("H100"), efficiency=load_efficiency())
    planner = Planner(
        model=cfg.model, recipe=cfg.recipe, optimizer=cfg.optimizer, machine=machine, total_tokens=cfg.run.tokens
    )
    return planner, search(planner, layout_of(cfg), devices=devices)


DEMO = (
    "experiment=demo",
    "batch.global_batch_size=64",
    "recipe=bf16",
    "model.mamba.num_groups=4",
    "model.attention.num_kv_heads=4",
)
PLANNER, FOUND = find(*DEMO, devices=32)


def test_plans_fill_the_devices_and_fit():
    assert FOUND.plans
    for plan in FOUND.plans:
        assert plan.layout.devices == 32
        assert plan.fits
        assert PLANNER.problems(plan.layout, devices=32) == []
        assert (plan.layout.global_batch_size, plan.layout.sequence_length) == (64, 512)


def test_plans_are_ranked_and_differ():
    seconds = [plan.time.total for plan in FOUND.plans]
    assert seconds == sorted(seconds)
    degrees = {(p.layout.pp, p.layout.dp_replicate, p.layout.dp_shard, p.layout.cp, p.layout.tp) for p in FOUND.plans}
    assert len(degrees) == len(FOUND.plans)


def test_groups_that_wait_in_every_block_stay_in_a_domain():
    for plan in FOUND.plans:
        layout = plan.layout
        assert layout.tp == 1 or spans(layout)["tp"] <= 8
        assert layout.cp == 1 or spans(layout)["cp"] <= 8
    assert any("leaves the domain" in item.reason for item in FOUND.rejected)


def test_reasons_have_counts_and_examples():
    assert sum(item.count for item in FOUND.rejected) <= FOUND.looked_at
    assert all(item.example for item in FOUND.rejected)
    assert any("num_kv_heads must be a multiple of N (tp)" in item.reason for item in FOUND.rejected)


def test_too_little_memory_is_a_reason_and_asks_for_recomputing():
    layout = replace(FOUND.plans[0].layout, micro_batch_size=8, dp_shard=8, dp_replicate=1, pp=1, cp=1, tp=1)
    block = replace(layout, checkpoint=ActivationCheckpoint.block, reshards=True)
    needed = PLANNER.rank_memory(block).total
    assert needed < PLANNER.rank_memory(replace(block, checkpoint=ActivationCheckpoint.none)).total
    small = replace(load_hardware("H100"), memory=needed + 1)
    other = replace(PLANNER, machine=replace(PLANNER.machine, hardware=small))
    plan = _cheapest_that_fits(other, layout)
    assert isinstance(plan, Plan)
    assert plan.layout == block
    tiny = replace(load_hardware("H100"), memory=1e9)
    _, nothing = find(*DEMO, devices=8, hardware=tiny)
    assert nothing.plans == []
    assert any("of a device however much is recomputed" in item.reason for item in nothing.rejected)


def test_a_pattern_with_segments_keeps_its_stages():
    _, found = find(*DEMO, "model.pattern=M-M|-M*-", "recipe.keep_bf16.last_blocks=0", devices=8)
    assert {plan.layout.num_stages for plan in found.plans} <= {1, 2}


@pytest.mark.parametrize("devices", [8, 16])
def test_experts_are_spread(devices: int):
    _, found = find(*DEMO, "model.pattern=ME*E", "recipe.keep_bf16.last_blocks=1", devices=devices)
    assert found.plans
    assert all(plan.layout.fsdp % plan.layout.ep == 0 for plan in found.plans)


def test_stages_of_the_configured_layout_rule_nothing_out():
    overrides = (*DEMO, "parallel.pp_degree=2", "parallel.pipeline_schedule=interleaved")
    few, many = (find(*overrides, f"parallel.stages_per_rank={count}", devices=4)[1] for count in (2, 4))
    assert [plan.layout for plan in few.plans] == [plan.layout for plan in many.plans]
    assert any(plan.layout.pp > 1 for plan in few.plans)
