"""The time model's parts: what makes each longer, and that they add up."""

from dataclasses import replace

import pytest

from nvfp4_train.analysis.plan.communication import Link, Traffic
from nvfp4_train.analysis.plan.hardware import load_hardware
from nvfp4_train.analysis.plan.layout import Layout
from nvfp4_train.analysis.plan.local import BlockKey
from nvfp4_train.analysis.plan.step_time import BlockTimer, Efficiency, Machine, StepTime, step_time
from nvfp4_train.analysis.plan.work import Work
from nvfp4_train.config.parallel import ActivationCheckpoint
from nvfp4_train.config.pattern import LayerKind
from nvfp4_train.model.peaks import Precision
from tests.support.configs import composed

PERFECT = Efficiency(
    gemm_bf16=1.0,
    gemm_fp8=1.0,
    gemm_fp4=1.0,
    gemm_memory=1.0,
    attention=1.0,
    scan=1.0,
    memory=1.0,
    quantize=1.0,
    link=1.0,
    overlap=1.0,
    kernel_seconds=0.0,
    mamba=1.0,
)
LAYOUT = Layout(micro_batch_size=1, global_batch_size=4, sequence_length=8192)
MLP = BlockKey(kind=LayerKind.mlp, kept=frozenset())


def timer(hardware: str = "GB200", recipe: str = "nvfp4", efficiency: Efficiency = PERFECT) -> BlockTimer:
    cfg = composed("model=paper_12b", f"recipe={recipe}")
    machine = Machine(hardware=load_hardware(hardware), efficiency=efficiency)
    return BlockTimer(machine=machine, work=Work(model=cfg.model, recipe=cfg.recipe))


def step(timed: BlockTimer, layout: Layout = LAYOUT, traffic: list[Traffic] | None = None) -> StepTime:
    return step_time([MLP, MLP], [], traffic or [], layout=layout, timer=timed)


def test_parts_add_up():
    found = step(timer())
    assert found.total == pytest.approx(sum(found.by_part.values()))
    assert found.gemm_fp4 > 0 == found.gemm_fp8 == found.attention == found.scan == found.bubble


def test_a_product_takes_its_flops_at_the_peak_and_more():
    hardware = load_hardware("GB200")
    flops = 4 * 2 * 2 * 3 * 2 * 5120 * 20480 * 8192
    assert hardware.fp4 is not None
    assert flops / hardware.fp4 < step(timer()).gemm_fp4 < 1.3 * flops / hardware.fp4
    assert flops / hardware.bf16 < step(timer(recipe="bf16")).gemm_bf16 < 1.2 * flops / hardware.bf16


def test_small_products_reach_less_of_the_peak():
    small = replace(LAYOUT, sequence_length=256, global_batch_size=128)
    assert step(timer(), small).gemm_fp4 > 1.2 * step(timer()).gemm_fp4


def test_hardware_without_the_format_emulates_it_in_bf16():
    hopper = timer("H100")
    assert hopper.machine.speed(Precision.fp4, emulated=False) is Precision.bf16
    found = step(hopper)
    assert found.gemm_fp4 == 0
    assert found.gemm_bf16 > 0
    assert found.quantization > step(timer("H100", "bf16")).quantization == 0
    amd = timer("MI355X").machine
    assert amd.speed(Precision.fp4, emulated=True) is Precision.bf16
    assert amd.speed(Precision.fp4, emulated=False) is Precision.fp4


def test_recomputing_repeats_the_forward():
    none, block = (step(timer(), replace(LAYOUT, checkpoint=ActivationCheckpoint(mode))) for mode in ("none", "block"))
    assert block.gemm_fp4 == pytest.approx(4 / 3 * none.gemm_fp4, rel=1e-2)
    assert block.optimizer == none.optimizer


def test_transfers_hide_behind_computing_where_they_may():
    hidden = Traffic(axis="dp_shard", what="x", bytes=1e6, can_overlap=True, link=Link.network)
    in_line = replace(hidden, can_overlap=False)
    large = replace(hidden, bytes=1e12)
    assert step(timer(), traffic=[hidden]).transfers == 0
    assert step(timer(), traffic=[in_line]).transfers == 1e6 / 50e9
    assert 0 < step(timer(), traffic=[large]).transfers < 1e12 / 50e9
    near = replace(in_line, link=Link.domain)
    assert step(timer(), traffic=[near]).transfers == 1e6 / 900e9


def test_a_pipeline_waits():
    layout = replace(LAYOUT, pp=2)
    found = step(timer(), layout)
    computing = found.total - found.bubble - found.optimizer
    assert found.bubble == pytest.approx(computing / 4)


def test_what_is_asked_twice_is_computed_once():
    timed = timer()
    assert timed.seconds(MLP, LAYOUT, recomputes=False) is timed.seconds(MLP, LAYOUT, recomputes=False)
