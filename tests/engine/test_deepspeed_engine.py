"""DeepSpeed trains as the torch engine does on one rank."""

import math
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nvfp4_train.checkpoint.error import CheckpointError
from nvfp4_train.config.engine import DeepSpeedEngineConfig, OffloadDevice
from nvfp4_train.config.model import ModelConfig
from nvfp4_train.config.parallel import ActivationCheckpoint
from nvfp4_train.config.recipe import ComputeDtype, RecipeConfig
from nvfp4_train.config.run import Device
from nvfp4_train.data.batch import Batch
from nvfp4_train.engine import deepspeed_engine as deepspeed_engine_module
from nvfp4_train.engine.base import Engine, Forward
from nvfp4_train.engine.build import prepare_model
from nvfp4_train.engine.deepspeed_engine import DeepSpeedEngine, deepspeed_config, import_deepspeed
from nvfp4_train.parallel.fsdp import parameters_in_compute_dtype
from nvfp4_train.parallel.runtime import Runtime, start_runtime, stop_runtime
from nvfp4_train.train.metrics import find_non_finite_parameter
from tests.support.deepspeed import RecordedGathers, needs_deepspeed, saved_state, whole_state
from tests.support.engines import NVFP4_MICRO_BATCH_SIZE, build_tiny_engine, train, train_nvfp4
from tests.support.ranks import run_on_ranks
from tests.support.recipes import cast_recipe, nvfp4_recipe
from tests.support.rounding import recorded_rounding
from tests.support.tiny import (
    SEQUENCE_LENGTH,
    deepspeed_engine,
    parallel_layout,
    parity_model,
    tiny_batches,
    tiny_model,
    tiny_optimizer,
)

pytestmark = [needs_deepspeed, pytest.mark.distributed]

STAGES = (1, 2, 3)
NUM_STEPS = 10
SAVED_STEP = 2
CONTINUED = range(SAVED_STEP, SAVED_STEP + 3)
# With such an eps the size of a gradient matters to Adam, and with that its clipping.
UNCLIPPED = tiny_optimizer(clip_grad_norm=0.0, eps=0.01)
CHECKPOINTED = ((1, "block"), (1, "selective"), (3, "block"), (3, "selective"))
FP32 = cast_recipe(ComputeDtype.fp32)
BF16 = cast_recipe(ComputeDtype.bf16)
HALVING = replace(BF16, after_optimizer="tests.support.outside:halve", after_optimizer_args={"after": 1})


def hybrid() -> ModelConfig:
    """That of the table of layouts, with routers that are corrected."""
    cfg = parity_model()
    return replace(cfg, moe=replace(cfg.moe, bias_update_rate=0.01))


def predictor() -> ModelConfig:
    """Blocks that two depths of prediction share, penalties of routers, one matrix for both ends."""
    cfg = tiny_model("M-*E/*E/*E", tie_embeddings=True)
    moe = replace(cfg.moe, auxiliary_loss_weight=0.01, z_loss_weight=0.001, bias_update_rate=0.01)
    return replace(cfg, moe=moe, mtp=replace(cfg.mtp, share_depths=True))


# Every option, far from its default.
OPTIONS = {
    "offload_1": deepspeed_engine(1, offload_optimizer=OffloadDevice.cpu),
    "offload_2": deepspeed_engine(2, offload_optimizer=OffloadDevice.cpu),
    "offload_3": deepspeed_engine(3, offload_optimizer=OffloadDevice.cpu, offload_param=OffloadDevice.cpu),
    "buckets_1": deepspeed_engine(1, overlap_comm=True, reduce_bucket_size=4000, allgather_bucket_size=2000),
    "buckets_2": deepspeed_engine(2, overlap_comm=True, reduce_bucket_size=4000, allgather_bucket_size=2000),
    "buckets_3": deepspeed_engine(
        3, overlap_comm=True, reduce_bucket_size=4000, prefetch_bucket_size=3000, param_persistence_threshold=200
    ),
}


def build(runtime: Runtime, recipe: RecipeConfig, cfg: DeepSpeedEngineConfig, **options: Any) -> DeepSpeedEngine:
    options.setdefault("model", hybrid())
    engine = build_tiny_engine(runtime, recipe, engine=cfg, **options)
    assert isinstance(engine, DeepSpeedEngine)
    return engine


def first_steps(engine: Engine) -> dict[str, Any]:
    """Take the steps before the checkpoint, in NVFP4, and keep what the first one rounds."""
    with recorded_rounding() as rounding:
        losses = train_nvfp4(engine, range(1))
    return {"rounding": rounding, "nvfp4": losses + train_nvfp4(engine, range(1, SAVED_STEP))}


def trained(runtime: Runtime, recipe: RecipeConfig, cfg: DeepSpeedEngineConfig, steps: int, **options: Any) -> Any:
    engine = build(runtime, recipe, cfg, **options)
    found = train(engine, range(steps))
    engine.close()
    return found


def evaluated(engine: Any, batches: list[Any]) -> list[tuple[float, float]]:
    return [
        (sum(float(losses.loss_sum) for losses in parts), sum(float(losses.num_labels) for losses in parts))
        for forward in Forward
        for parts in [[engine.evaluate(batch, forward=forward) for batch in batches]]
    ]


def halved(runtime: Runtime, cfg: DeepSpeedEngineConfig, path: Path) -> dict[str, Any]:
    """Train in BF16 with a function after the optimizer; also say how many masters are BF16 numbers."""
    engine = build(runtime, HALVING, cfg)
    losses = train(engine, range(3))
    state = whole_state(engine, path)
    engine.close()
    masters = torch.cat([value.flatten() for name, value in state.items() if name.endswith("/master")])
    return {"losses": losses, "rounded_masters": float((masters == masters.bfloat16()).double().mean())}


def gathered_in_evaluation(engine: DeepSpeedEngine, batch: Batch) -> dict[torch.dtype, int]:
    with RecordedGathers() as gathers:
        engine.evaluate(batch, forward=Forward.recipe)
    return dict(gathers.elements)


def poison(engine: DeepSpeedEngine, runtime: Runtime, path: Path) -> dict[str, Any]:
    """Make the loss of one rank infinite: its gradients are not finite."""
    before = whole_state(engine, path)
    denominator = torch.tensor(1e-38 if runtime.rank == runtime.world_size - 1 else 1.0)
    engine.forward_backward(tiny_batches(step=50)[:1], denominator)
    norm = engine.optimizer_step(lr=1e-2, weight_decay=0.1).item()
    after = whole_state(engine, path)
    return {
        "norm": norm,
        "unchanged": all(torch.equal(before[name], after[name]) for name in before),
        "step": engine.step,
        "next": train(engine, range(51, 52)),
    }


def failed_save(engine: DeepSpeedEngine, runtime: Runtime, path: Path) -> dict[str, Any]:
    """Save where the last rank finds no room on its disk."""

    def full(values: dict[str, Any], path: Path) -> None:
        raise OSError("no space left")

    original = deepspeed_engine_module.write_file
    if runtime.rank == runtime.world_size - 1:
        deepspeed_engine_module.write_file = full
    try:
        with pytest.raises(CheckpointError) as error:
            engine.save(path, {})
    finally:
        deepspeed_engine_module.write_file = original
    return {"message": str(error.value), "left": path.parent.exists() and len(list(path.parent.iterdir()))}


def run_stage(runtime: Runtime, stage: int, folder: Path) -> dict[str, Any]:
    cfg, found = deepspeed_engine(stage), {}
    found["fp32"] = trained(runtime, FP32, cfg, NUM_STEPS)
    found["predictor"] = trained(runtime, FP32, cfg, 2, model=predictor())
    found["halved"] = halved(runtime, cfg, folder / f"halved_{stage}/step_00000003")
    nvfp4 = build(runtime, nvfp4_recipe(), cfg)
    found |= first_steps(nvfp4)
    path = folder / f"stage_{stage}/step_00000002"
    nvfp4.save(path, {"tokens": 384})
    found["saved"] = saved_state(path)
    own = tiny_batches(step=99)[runtime.rank]
    found["gathered"] = gathered_in_evaluation(nvfp4, own)
    found["evaluated"] = evaluated(nvfp4, [own])
    found["nvfp4"] += train_nvfp4(nvfp4, range(SAVED_STEP, NUM_STEPS))
    found["failed_save"] = failed_save(nvfp4, runtime, folder / f"failed_{stage}/step_00000010")
    found["finite"] = find_non_finite_parameter(nvfp4.model)
    found["poisoned"] = poison(nvfp4, runtime, folder / f"poisoned_{stage}/step_00000010")
    nvfp4.close()
    again = build(runtime, nvfp4_recipe(), cfg)
    found["again"] = train_nvfp4(again, range(SAVED_STEP))
    train(again, range(60, 61))  # whatever it did before is forgotten
    found["metadata"] = again.load(path)
    found["loaded"] = whole_state(again, folder / f"again_{stage}/step_00000002")
    found["continued"] = train_nvfp4(again, CONTINUED)
    again.close()
    return found


def loading_error(runtime: Runtime, path: Path, model: ModelConfig) -> str:
    engine = build(runtime, nvfp4_recipe(), deepspeed_engine(1), model=model)
    with pytest.raises(CheckpointError) as error:
        engine.load(path)
    engine.close()
    return str(error.value)


def run_two_ranks(runtime: Runtime, folder: Path) -> dict[Any, Any]:
    found: dict[Any, Any] = {stage: run_stage(runtime, stage, folder) for stage in STAGES}
    found["errors"] = {
        "engine": loading_error(runtime, folder / "torch/step_00000002", hybrid()),
        "model": loading_error(runtime, folder / "stage_3/step_00000002", tiny_model("M*-")),
    }
    return found


def run_four_ranks(runtime: Runtime) -> dict[str, Any]:
    cfg = deepspeed_engine(3)
    fp32 = trained(runtime, FP32, cfg, NUM_STEPS)
    nvfp4 = build(runtime, nvfp4_recipe(), cfg)
    found = first_steps(nvfp4)
    found["nvfp4"] += train_nvfp4(nvfp4, range(SAVED_STEP, NUM_STEPS))
    nvfp4.close()
    return {"fp32": fp32} | found


def run_variants(runtime: Runtime) -> dict[str, Any]:
    found = {name: trained(runtime, FP32, cfg, 3) for name, cfg in OPTIONS.items()}
    for name in ("offload_3", "buckets_3"):
        found[f"bf16_{name}"] = trained(runtime, BF16, OPTIONS[name], 3)
    found["bf16"] = trained(runtime, BF16, deepspeed_engine(3), 3)
    for stage in STAGES:
        found[f"unclipped_{stage}"] = trained(runtime, FP32, deepspeed_engine(stage), 3, optimizer=UNCLIPPED)
    for stage, mode in CHECKPOINTED:
        parallel = parallel_layout(activation_checkpoint=ActivationCheckpoint(mode))
        found[f"{mode}_{stage}"] = trained(
            runtime, FP32, deepspeed_engine(stage), 2, model=predictor(), parallel=parallel
        )
    return found


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    yield start_runtime(Device.cpu)
    stop_runtime()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def one(runtime, folder) -> dict[str, Any]:
    """The torch engine on one rank."""
    found: dict[str, Any] = {"fp32": train(build_tiny_engine(runtime, FP32, model=hybrid()), range(NUM_STEPS))}
    found["predictor"] = train(build_tiny_engine(runtime, FP32, model=predictor()), range(2))
    found["halved"] = train(build_tiny_engine(runtime, HALVING, model=hybrid()), range(3))
    nvfp4 = build_tiny_engine(runtime, nvfp4_recipe(), model=hybrid())
    found |= first_steps(nvfp4)
    nvfp4.save(folder / "torch/step_00000002", {"tokens": 384})
    found["evaluated"] = evaluated(nvfp4, tiny_batches(step=99)[:2])
    found["nvfp4"] += train_nvfp4(nvfp4, range(SAVED_STEP, NUM_STEPS))
    return found


@pytest.fixture(scope="module")
def two(one, folder) -> list[dict[Any, Any]]:
    return run_on_ranks(run_two_ranks, 2, folder, timeout_seconds=600)


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    return run_on_ranks(run_four_ranks, 4, timeout_seconds=600)


@pytest.fixture(scope="module")
def variants() -> list[dict[str, Any]]:
    return run_on_ranks(run_variants, 2, timeout_seconds=600)


def assert_close(found: list[tuple[float, float]], expected: list[tuple[float, float]], *, rel: float) -> None:
    assert len(found) <= len(expected)
    for step, (values, wanted) in enumerate(zip(found, expected, strict=False)):
        assert values == pytest.approx(wanted, rel=rel), f"step {step}"


def assert_same_losses_in_nvfp4(found: list[tuple[float, float]], expected: list[tuple[float, float]]) -> None:
    """From the second step on masters differ by FP32 rounding, which at times moves a value across a boundary."""
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    for (loss, _), (wanted, _) in zip(found, expected, strict=True):
        assert loss == pytest.approx(wanted, rel=2e-3)


def assert_same_rounding(ranks: list[dict[str, Any]], expected: dict[tuple[str, str, int], tuple[str, object]]) -> None:
    """Codes, scales and random streams of the first step; what experts are given is outside this promise."""

    def promised(rounding: dict[Any, Any]) -> dict[Any, Any]:
        return {key: value for key, value in rounding.items() if ".experts." not in key[0] or key[1].endswith(".w")}

    together = {key: value for found in ranks for key, value in found["rounding"].items()}
    assert together.keys() == expected.keys()
    assert promised(together) == promised(expected)
    tokens = NVFP4_MICRO_BATCH_SIZE * SEQUENCE_LENGTH
    assert {first_token for _, _, first_token in together} == {-1, *range(0, 4 * tokens, tokens)}
    streams = {key: stream for key, (_, stream) in together.items()}
    assert streams == {key: stream for key, (_, stream) in expected.items()}
    assert any(".experts." in layer for layer, _, _ in together)


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_train_as_one_in_fp32(one, two, stage):
    for found in two:
        assert len(found[stage]["fp32"]) == NUM_STEPS
        assert_close(found[stage]["fp32"], one["fp32"], rel=1e-5)
        assert_close(found[stage]["predictor"], one["predictor"], rel=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_train_as_one_in_nvfp4(one, two, stage):
    assert_same_losses_in_nvfp4(two[0][stage]["nvfp4"], one["nvfp4"])


@pytest.mark.parametrize("stage", STAGES)
def test_rounding_of_the_first_step_is_bitwise_that_of_one_rank(one, two, stage):
    assert_same_rounding([found[stage] for found in two], one["rounding"])


@pytest.mark.parametrize("stage", STAGES)
def test_losses_and_norms_are_bitwise_equal_on_all_ranks(two, stage):
    for key in ("fp32", "predictor", "halved", "nvfp4", "continued"):
        assert two[0][stage][key] == two[1][stage][key], key


@pytest.mark.parametrize("stage", STAGES)
def test_the_same_run_twice_is_bitwise_equal(two, stage):
    for found in two:
        assert found[stage]["again"] == found[stage]["nvfp4"][:SAVED_STEP]


@pytest.mark.slow
def test_four_ranks_train_as_one(one, four):
    for found in four:
        assert len(found["fp32"]) == NUM_STEPS
        assert_close(found["fp32"], one["fp32"], rel=1e-5)
        assert (found["fp32"], found["nvfp4"]) == (four[0]["fp32"], four[0]["nvfp4"])
    assert_same_losses_in_nvfp4(four[0]["nvfp4"], one["nvfp4"])
    assert_same_rounding(four, one["rounding"])


def test_weights_of_linears_are_gathered_in_bf16_and_what_must_be_fp32_is_not(two):
    model = prepare_model(hybrid(), nvfp4_recipe(), seed=0).model
    in_bf16 = {id(parameter) for parameter in parameters_in_compute_dtype(model)}
    expected: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        padded = math.ceil(parameter.numel() / 2) * 2
        expected[torch.bfloat16 if id(parameter) in in_bf16 else torch.float32] += padded
    for found in two:
        assert found[3]["gathered"] == expected
        assert found[1]["gathered"] == found[2]["gathered"] == {}


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "mode"), CHECKPOINTED)
def test_checkpointing_of_activations_changes_nothing_but_memory(one, variants, stage, mode):
    for found in variants:
        assert_close(found[f"{mode}_{stage}"], one["predictor"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_options_change_where_things_are_and_not_what_they_are(one, variants, name):
    for found in variants:
        assert_close(found[name], one["fp32"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["offload_3", "buckets_3"])
def test_options_do_not_change_what_is_gathered_in_bf16(variants, name):
    for found in variants:
        assert_close(found[f"bf16_{name}"], found["bf16"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_largest_norm_of_zero_clips_nothing(runtime, variants, stage):
    clipped, unclipped = (
        train(build_tiny_engine(runtime, FP32, model=hybrid(), optimizer=optimizer), range(3))
        for optimizer in (replace(UNCLIPPED, clip_grad_norm=1.0), UNCLIPPED)
    )
    assert unclipped[2] != pytest.approx(clipped[2], rel=1e-4)
    for found in variants:
        assert_close(found[f"unclipped_{stage}"], unclipped, rel=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_a_function_after_the_optimizer_changes_the_masters(one, two, stage):
    for found in two:
        assert_close(found[stage]["halved"]["losses"], one["halved"], rel=1e-3)
        assert found[stage]["halved"]["rounded_masters"] < 0.1  # of norms, which begin at one
    assert one["halved"][2] != pytest.approx(one["fp32"][2], rel=1e-2)


@pytest.mark.parametrize("stage", STAGES)
def test_an_evaluation_is_summed_over_ranks(one, two, stage):
    for found in two:
        for (loss, labels), (wanted, wanted_labels) in zip(found[stage]["evaluated"], one["evaluated"], strict=True):
            assert loss == pytest.approx(wanted, rel=2e-3)
            assert labels == wanted_labels


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_continued_from_a_checkpoint_is_bitwise_the_unbroken_one(two, stage):
    for found in two:
        assert found[stage]["metadata"] == {"tokens": 384}
        saved, loaded = found[stage]["saved"], found[stage]["loaded"]
        assert loaded.keys() == saved.keys()
        assert [name for name in saved if not torch.equal(saved[name], loaded[name])] == []
        assert found[stage]["continued"] == found[stage]["nvfp4"][CONTINUED.start : CONTINUED.stop]


@pytest.mark.parametrize("stage", STAGES)
def test_a_non_finite_gradient_of_one_rank_is_skipped_by_all(two, stage):
    for found in two:
        poisoned = found[stage]["poisoned"]
        assert not math.isfinite(poisoned["norm"])
        assert poisoned["unchanged"]
        assert poisoned["step"] == NUM_STEPS + 1
        assert all(math.isfinite(value) for value in poisoned["next"][0])
        assert found[stage]["finite"] is None


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_that_cannot_write_is_an_error_on_all_and_leaves_nothing(two, stage):
    for found in two:
        assert "was not saved" in found[stage]["failed_save"]["message"]
        assert "On rank 1: OSError: no space left" in found[stage]["failed_save"]["message"]
    assert two[0][stage]["failed_save"]["left"] == 0


def test_a_checkpoint_that_does_not_fit_is_refused_with_a_way_out(two):
    for found in two:
        errors = found["errors"]
        assert "was saved by the engine torch, this run uses deepspeed" in errors["engine"]
        assert "scripts/convert_checkpoint.py" in errors["engine"]
        assert "only in the checkpoint: blocks.3" in errors["model"]


def test_null_leaves_deepspeed_its_own_value():
    config = deepspeed_config(deepspeed_engine(2), max_grad_norm=0.5)
    assert config["zero_optimization"] == {"stage": 2, "overlap_comm": False}
    assert config["gradient_clipping"] == 0.5


def test_without_deepspeed_the_error_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ValueError, match=re.escape("pip install 'nvfp4-train[deepspeed]'")):
        import_deepspeed()


def train_without_launcher(runtime: Runtime) -> list[tuple[float, float]]:
    os.environ.pop("LOCAL_RANK")
    return trained(runtime, FP32, deepspeed_engine(1), 1)


def test_a_single_process_needs_no_launcher(one):
    [[found]] = run_on_ranks(train_without_launcher, 1)
    assert found == pytest.approx(one["fp32"][0], rel=1e-5)
