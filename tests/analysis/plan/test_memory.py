"""Memory by kind; test_plan_reality.py holds it against engines."""

from dataclasses import replace

import pytest

from nvfp4_train.analysis.plan.calibration import load_efficiency
from nvfp4_train.analysis.plan.hardware import load_hardware
from nvfp4_train.analysis.plan.layout import Layout, Schedule
from nvfp4_train.analysis.plan.memory import LABELS, Memory
from nvfp4_train.analysis.plan.planner import Planner
from nvfp4_train.analysis.plan.step_time import Machine
from nvfp4_train.config.parallel import ActivationCheckpoint
from tests.support.configs import composed

LAYOUT = Layout(dp_shard=8, micro_batch_size=1, global_batch_size=16, sequence_length=512)


def planner(*overrides: str) -> Planner:
    cfg = composed(*overrides)
    machine = Machine(hardware=load_hardware("H100"), efficiency=load_efficiency())
    return Planner(
        model=cfg.model, recipe=cfg.recipe, optimizer=cfg.optimizer, machine=machine, total_tokens=cfg.run.tokens
    )


def memory(planned: Planner, layout: Layout, rank: int = 0) -> Memory:
    return planned.memory.of_rank(planned.stages(layout), layout, rank=rank)


DEMO = planner("experiment=demo")


def test_the_total_is_the_sum_of_all_kinds():
    found = memory(DEMO, LAYOUT)
    assert set(found.by_kind) == set(LABELS)
    assert found.total == sum(found.by_kind.values())
    assert all(size > 0 for size in found.by_kind.values())


def test_sharding_divides_masters_gradients_and_optimizer():
    one, eight = memory(DEMO, replace(LAYOUT, dp_shard=1)), memory(DEMO, LAYOUT)
    for kind in ("masters", "gradients", "optimizer"):
        assert one.by_kind[kind] == pytest.approx(8 * eight.by_kind[kind], rel=0.02)
    assert one.quantized_weights == eight.quantized_weights


def test_quantized_weights_are_those_of_quantized_linears():
    linears = DEMO.built.coverage
    elements = sum(row.in_features * row.out_features for row in linears if row.recipe == "nvfp4")
    assert memory(DEMO, LAYOUT).quantized_weights == elements * 4.5 / 8
    assert memory(planner("experiment=demo", "recipe=bf16"), LAYOUT).quantized_weights == 0


def test_accumulating_takes_whole_gradients():
    many = memory(DEMO, LAYOUT).accumulated_gradients
    once = memory(DEMO, replace(LAYOUT, global_batch_size=8)).accumulated_gradients
    num_parameters = sum(parameter.numel() for parameter in DEMO.built.model.parameters())
    assert many == 4 * num_parameters
    assert once < many / 4


def test_keeping_weights_gathered_takes_them_all():
    kept, freed = (memory(DEMO, replace(LAYOUT, reshards=reshards)).gathered_weights for reshards in (False, True))
    near = memory(DEMO, replace(LAYOUT, reshard_ranks=4)).gathered_weights
    assert freed < near < kept


def test_checkpointing_moves_memory_to_the_workspace():
    none, block = (
        memory(DEMO, replace(LAYOUT, checkpoint=mode))
        for mode in (ActivationCheckpoint.none, ActivationCheckpoint.block)
    )
    assert block.activations < none.activations
    assert block.workspace > none.workspace


def test_a_pipeline_holds_microbatches_in_flight():
    layout = replace(LAYOUT, pp=2, dp_shard=1, schedule=Schedule.one_f_one_b)
    first, last = (memory(DEMO, layout, rank) for rank in (0, 1))
    gpipe = memory(DEMO, replace(layout, schedule=Schedule.gpipe), 0)
    assert gpipe.activations == 8 * first.activations
    whole = memory(DEMO, replace(layout, pp=1))
    assert first.masters + last.masters == whole.masters


def test_offloaded_moments_are_not_on_the_device():
    found = memory(planner("experiment=demo", "optimizer.state_offload=cpu"), LAYOUT)
    assert found.optimizer == 0
    assert found.host == memory(DEMO, LAYOUT).optimizer
