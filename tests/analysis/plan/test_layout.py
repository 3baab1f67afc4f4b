"""Layouts: what the configuration says, how a rest is filled, and what is refused."""

from dataclasses import replace

import pytest

from nvfp4_train.analysis.plan.layout import (
    PREFETCH_BUCKET,
    Layout,
    Schedule,
    filled,
    layout_of,
    layout_problems,
    parallel_of,
)
from nvfp4_train.config.model import NormGroup
from nvfp4_train.config.parallel import ActivationCheckpoint
from tests.support.configs import composed
from tests.support.models import TINY_MOE, tiny_model

LAYOUT = Layout(micro_batch_size=1, global_batch_size=16, sequence_length=64)
MODEL = tiny_model(pattern="M-*-M-E", moe=TINY_MOE)


def keys(layout: Layout, *, devices: int | None = None) -> list[str]:
    return [problem.key for problem in layout_problems(layout, MODEL, devices=devices or layout.devices)]


def test_the_configuration_is_read():
    cfg = composed(
        "experiment=tiny",
        "model.mamba.num_groups=2",
        "parallel.dp_shard_degree=2",
        "parallel.tp_degree=2",
        "parallel.sequence_parallel=false",
        "parallel.activation_checkpoint=block",
        "engine.reshard_after_forward=false",
    )
    layout = layout_of(cfg)
    assert (layout.dp_shard, layout.tp, layout.devices) == (2, 2, 4)
    assert layout.checkpoint is ActivationCheckpoint.block
    assert not layout.reshards
    assert not layout.sequence_parallel
    assert layout.num_microbatches == 1


@pytest.mark.parametrize(
    ("stages", "schedule"),
    [(1, Schedule.gpipe), (2, Schedule.interleaved), (2, Schedule.zero_bubble), (2, Schedule.zbv)],
)
def test_the_pipeline_is_read(stages: int, schedule: Schedule):
    pipeline = [f"parallel.pipeline_schedule={schedule.value}", f"parallel.stages_per_rank={stages}"]
    cfg = composed("experiment=tiny", "parallel.pp_degree=2", "model.tie_embeddings=false", *pipeline)
    layout = layout_of(cfg)
    assert (layout.pp, layout.schedule, layout.num_virtual_stages) == (2, schedule, stages)
    assert parallel_of(replace(layout, dp_shard=1)) == replace(cfg.parallel, dp_shard_degree=1)


def test_sums_of_tp_are_read():
    cfg = composed(
        "experiment=tiny", "parallel.tp_degree=2", "model.mamba.num_groups=2", "parallel.tp_reduce_dtype=fp32"
    )
    assert layout_of(cfg).tp_sum_bytes == 4
    assert LAYOUT.tp_sum_bytes == 2


def test_deepspeed_is_read():
    offload = ("engine.offload_optimizer=cpu", "engine.reduce_bucket_size=1000")
    zero = layout_of(composed("experiment=tiny", "engine=deepspeed", "engine.zero_stage=3", *offload)).zero
    assert zero is not None
    assert (zero.stage, zero.offloads_optimizer, zero.offloads_parameters) == (3, True, False)
    assert (zero.reduce_bucket, zero.prefetch_bucket) == (1000, PREFETCH_BUCKET)
    assert "ZeRO 3 optimizer offloaded" in replace(LAYOUT, zero=zero).describe()


def test_what_is_left_goes_to_dp_shard():
    layout = layout_of(composed("experiment=tiny"))
    assert layout.dp_shard == 0
    assert filled(layout, devices=2).dp_shard == 2
    assert filled(replace(LAYOUT, tp=2, dp_shard=2), devices=16).dp_shard == 8


def test_a_rest_that_cannot_be_filled_is_an_error():
    layout = filled(replace(LAYOUT, tp=2, dp_shard=0), devices=7)
    assert keys(layout, devices=7) == ["--devices"]


def test_derived_degrees():
    layout = replace(LAYOUT, dp_replicate=2, dp_shard=2, cp=2, tp=2, pp=2, ep=4, num_virtual_stages=2)
    assert (layout.devices, layout.dp, layout.fsdp, layout.expert_fsdp) == (32, 4, 4, 1)
    assert (layout.num_stages, layout.num_microbatches, layout.tokens) == (4, 4, 32)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"dp_shard": 3}, "batch.global_batch_size"),
        ({"cp": 3}, "batch.sequence_length"),
        ({"ep": 2}, "dp_shard x cp"),
        ({"tp": 4}, "model.attention.num_kv_heads"),
        ({"dp_shard": 16, "ep": 16}, "model.moe.num_experts"),
        ({"pp": 8}, "pp"),
        ({"pp": 4, "micro_batch_size": 8}, "microbatches"),
        ({"pp": 2, "num_virtual_stages": 2, "dp_shard": 16, "schedule": Schedule.interleaved}, "microbatches"),
        ({"dp_shard": 4, "reshard_ranks": 3}, "dp_shard x cp"),
    ],
)
def test_what_does_not_divide_is_refused(changes: dict[str, object], key: str):
    assert key in keys(replace(LAYOUT, **changes))  # type: ignore[arg-type]


def test_a_layout_that_fits_has_no_problems():
    assert keys(replace(LAYOUT, pp=2, dp_shard=2, cp=2, tp=2, ep=4)) == []


def test_a_norm_over_the_whole_width_is_divided():
    mamba = replace(MODEL.mamba, norm_group=NormGroup.whole)
    assert layout_problems(replace(LAYOUT, tp=2), replace(MODEL, mamba=mamba), devices=2) == []


def test_the_width_between_experts_is_divided():
    moe = replace(MODEL.moe, d_latent=17)
    [problem] = layout_problems(replace(LAYOUT, tp=2), replace(MODEL, moe=moe), devices=2)
    assert problem.key == "model.moe.d_latent"


def test_segments_of_the_pattern_are_stages():
    model = tiny_model(pattern="M-|*-|M-")
    layout = replace(LAYOUT, pp=2)
    [problem] = layout_problems(layout, model, devices=2)
    assert problem.key == "model.pattern"
    assert layout_problems(replace(layout, pp=3), model, devices=3) == []


def test_experts_need_a_model_that_has_some():
    [problem] = layout_problems(replace(LAYOUT, dp_shard=2, ep=2), tiny_model(), devices=2)
    assert problem.key == "ep"


def test_a_layout_describes_itself():
    text = replace(LAYOUT, tp=2, pp=2).describe()
    assert "tp 2" in text
    assert "1f1b" in text
    assert "cp" not in text
