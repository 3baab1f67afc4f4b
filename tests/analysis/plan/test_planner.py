"""A plan is consistent in itself, and what is wrong is said at once."""

from dataclasses import replace

import pytest

from nvfp4_train.analysis.plan.calibration import load_efficiency
from nvfp4_train.analysis.plan.hardware import load_hardware
from nvfp4_train.analysis.plan.layout import Layout, layout_of
from nvfp4_train.analysis.plan.planner import Planner
from nvfp4_train.analysis.plan.step_time import Machine
from nvfp4_train.model.flops import count_flops
from tests.support.configs import composed

CFG = composed("experiment=paper_12b_nvfp4")
LAYOUT = replace(layout_of(CFG), dp_shard=16, pp=2, tp=2)


def planner(*overrides: str, hardware: str = "GB200") -> Planner:
    cfg = composed(*(overrides or ("experiment=paper_12b_nvfp4",)))
    machine = Machine(hardware=load_hardware(hardware), efficiency=load_efficiency())
    return Planner(
        model=cfg.model, recipe=cfg.recipe, optimizer=cfg.optimizer, machine=machine, total_tokens=cfg.run.tokens
    )


PLANNER = planner()
PLAN = PLANNER.plan(LAYOUT)


def test_stages_hold_the_whole_model_once():
    assert [index for item in PLAN.stages for index in item.stage.blocks] == list(range(62))
    whole = sum(parameter.numel() for parameter in PLANNER.built.model.parameters())
    assert 2 * sum(item.num_parameters for item in PLAN.stages) == pytest.approx(whole, rel=1e-3)
    assert [item.kept_blocks for item in PLAN.stages] == [[0, 1], list(range(54, 62))]


def test_flops_are_those_of_the_modules():
    report = count_flops(PLANNER.built.model, document_lengths=[8192])
    assert PLAN.flops == report.model * 736
    assert sum(item.flops for item in PLAN.stages) == pytest.approx(PLAN.flops)
    assert 0.7 < PLAN.low_precision_flops / PLAN.flops < 0.84


def test_days_and_cost_follow_from_the_time():
    tokens = 736 * 8192
    assert PLAN.tokens_per_second == tokens / PLAN.time.total
    assert PLAN.days == pytest.approx(CFG.run.tokens / tokens * PLAN.time.total / 86400)
    assert PLAN.cost == pytest.approx(PLAN.days * 24 * 64 * load_hardware("GB200").price)


def test_every_pipeline_rank_has_memory_and_the_first_holds_most_microbatches():
    assert len(PLAN.memory) == 2
    assert PLAN.peak_memory == max(memory.total for memory in PLAN.memory)
    assert PLAN.fits == (PLAN.peak_memory <= load_hardware("GB200").memory)
    assert PLANNER.rank_memory(LAYOUT).total == PLAN.peak_memory


def test_shortcuts_agree_with_the_plan():
    assert PLANNER.step_time(LAYOUT).total == PLAN.time.total
    assert PLANNER.quick_seconds(LAYOUT) == pytest.approx(PLAN.time.total)


def test_a_rank_of_less_memory_does_not_fit():
    whole = Layout(micro_batch_size=1, global_batch_size=736, sequence_length=8192)
    assert not planner(hardware="H100").plan(whole).fits


def test_every_problem_is_reported_at_once():
    layout = replace(LAYOUT, tp=16, cp=3, dp_shard=2)
    keys = [problem.key for problem in PLANNER.problems(layout, devices=layout.devices)]
    assert {"batch.sequence_length", "model.attention.num_kv_heads", "model.mamba.num_groups"} <= set(keys)


def test_rules_that_match_nothing_come_with_the_others():
    wrong = planner("experiment=demo", "recipe.keep_bf16.modules=[nothing]")
    layout = Layout(micro_batch_size=1, global_batch_size=4, sequence_length=512, tp=3)
    keys = [problem.key for problem in wrong.problems(layout, devices=3)]
    assert "recipe.keep_bf16.modules" in keys
    assert "model.attention.num_kv_heads" in keys


def test_local_widths_are_checked():
    """33 blocks of 16 columns are whole blocks, half of them are not."""
    wrong = planner("experiment=demo", "model.mamba.num_groups=2", "model.mlp.d_ff=528")
    layout = Layout(micro_batch_size=1, global_batch_size=4, sequence_length=512, tp=2)
    problems = wrong.problems(layout, devices=2)
    assert problems
    assert all("_proj" in problem.key and problem.value == 264 for problem in problems), problems


@pytest.mark.parametrize(
    "hardware",
    ["H100", "GB200", "MI355X", *(pytest.param(name, marks=pytest.mark.slow) for name in ("H200", "B200", "GB300"))],
)
def test_every_accelerator_gets_a_plan(hardware: str):
    plan = planner("experiment=demo", hardware=hardware).plan(
        Layout(dp_shard=8, micro_batch_size=1, global_batch_size=16, sequence_length=512)
    )
    assert 0 < plan.time.total < 10
    assert plan.fits
    assert (plan.time.gemm_fp4 > 0) == (hardware in ("B200", "GB200", "GB300"))
