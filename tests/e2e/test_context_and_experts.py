"""Engines whose ranks share rows or experts: what the table of layouts does not look at."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from nvfp4_train.config.model import ModelConfig, Position
from nvfp4_train.config.parallel import ActivationCheckpoint
from nvfp4_train.config.recipe import ComputeDtype, RecipeConfig
from nvfp4_train.config.run import Device
from nvfp4_train.data.batch import IGNORE_INDEX, Batch
from nvfp4_train.engine.base import Engine, Forward
from nvfp4_train.parallel.runtime import Runtime, start_runtime, stop_runtime
from tests.support.engines import build_tiny_engine, train
from tests.support.ranks import run_on_ranks
from tests.support.recipes import cast_recipe, nvfp4_recipe
from tests.support.tiny import SEQUENCE_LENGTH, parallel_layout, tiny_batches, tiny_model

FP32 = cast_recipe(ComputeDtype.fp32)
LAYOUTS: dict[str, dict[str, Any]] = {"cp2": {"cp": 2}, "ep2": {"ep": 2}, "single": {}}
MODES = {"none": "none", "again": "none", "block": "block", "selective": "selective"}


def model_cfg() -> ModelConfig:
    """Every kind of block, a sliding window, rotary positions and all ways to balance experts."""
    cfg = tiny_model("M*E-/*E")
    moe = replace(cfg.moe, auxiliary_loss_weight=0.01, z_loss_weight=0.001, bias_update_rate=0.01, d_latent=16)
    return replace(cfg, moe=moe, attention=replace(cfg.attention, position=Position.rope, window_tokens=12))


def build(runtime: Runtime, recipe: RecipeConfig, layout: str, *, mode: str = "none", seed: int = 0) -> Engine:
    parallel = parallel_layout(activation_checkpoint=ActivationCheckpoint(mode), **LAYOUTS[layout])
    engine = build_tiny_engine(runtime, recipe, model=model_cfg(), parallel=parallel, seed=seed)
    engine._position.seed = 0  # type: ignore[attr-defined]
    return engine


def padded_rows(step: int) -> list[Batch]:
    """Two microbatches of two rows, one of which ends in padding that fills a rank's part."""
    batches = tiny_batches(step=step, num_microbatches=2, micro_batch_size=2)
    for batch in batches:
        batch.labels[1, SEQUENCE_LENGTH // 2 :] = IGNORE_INDEX
    return batches


def train_rows(engine: Engine, *, num_steps: int) -> list[tuple[float, float]]:
    found = []
    for step in range(num_steps):
        batches = padded_rows(step)[engine.mesh.dp_rank :: engine.mesh.dp_degree]
        labels = torch.stack([batch.num_labels() for batch in batches]).sum().float()
        loss = engine.forward_backward(batches, engine.mesh.sum_over_data(labels))
        found.append((loss.item(), engine.optimizer_step(lr=3e-3, weight_decay=0.1).item()))
    return found


def evaluated(engine: Engine) -> dict[str, tuple[float, int]]:
    """Loss and labels of the same two microbatches, whichever ranks take them."""
    own = tiny_batches(step=99, num_microbatches=2)[engine.mesh.dp_rank :: engine.mesh.dp_degree]
    found = {}
    for forward in Forward:
        losses = [engine.evaluate(batch, forward=forward) for batch in own]
        found[forward.value] = (
            sum(item.loss_sum.item() for item in losses),
            sum(int(item.num_labels) for item in losses),
        )
    return found


def run_two(runtime: Runtime) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for layout in ("cp2", "ep2"):
        for key, mode in MODES.items():
            engine = build(runtime, nvfp4_recipe(), layout, mode=mode)
            found[layout, key] = train(engine, range(2), num_microbatches=2)
        found[layout, "evaluated nvfp4"] = evaluated(engine)
        engine = build(runtime, FP32, layout)
        found[layout, "evaluated"] = evaluated(engine)
        found[layout, "rows"] = train_rows(engine, num_steps=2)
    return found


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    yield start_runtime(Device.cpu)
    stop_runtime()


@pytest.fixture(scope="module")
def single(runtime) -> dict[str, Any]:
    engine = build(runtime, FP32, "single")
    return {
        "evaluated": evaluated(engine),
        "rows": train_rows(engine, num_steps=2),
    }


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_on_ranks(run_two, 2, timeout_seconds=400)


@pytest.fixture(params=["cp2", "ep2"])
def layout(request) -> str:
    return request.param


@pytest.mark.distributed
def test_the_same_layout_again_and_recomputed_is_bitwise_the_same(two, layout):
    for found in two:
        assert all(found[layout, key] == two[0][layout, "none"] for key in MODES)


@pytest.mark.distributed
def test_rows_with_padding_train_as_in_one_process(single, two, layout):
    for found in two:
        for values, wanted in zip(found[layout, "rows"], single["rows"], strict=True):
            assert values == pytest.approx(wanted, rel=1e-5)


@pytest.mark.distributed
def test_evaluation_counts_every_label_once(single, two, layout):
    for found in two:
        for forward, (loss, num_labels) in single["evaluated"].items():
            assert found[layout, "evaluated"][forward] == (pytest.approx(loss, rel=1e-6), num_labels)
        recipe, bf16 = (found[layout, "evaluated nvfp4"][forward] for forward in ("recipe", "bf16"))
        assert recipe[1] == bf16[1] == num_labels
        assert recipe[0] != bf16[0]
