"""What a pipeline must not change, and what each rank of it has; losses are compared in e2e/test_layout_parity.py."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_train.config.model import ModelConfig
from nvfp4_train.config.parallel import ActivationCheckpoint
from nvfp4_train.config.problem import ConfigError
from nvfp4_train.config.recipe import ComputeDtype, RecipeConfig
from nvfp4_train.config.run import Device
from nvfp4_train.engine.base import Engine, Forward
from nvfp4_train.model.block import Block
from nvfp4_train.model.hybrid import build_model
from nvfp4_train.model.router import Router
from nvfp4_train.parallel.imbalance import expert_imbalance
from nvfp4_train.parallel.mesh import build_mesh
from nvfp4_train.parallel.pipeline import check_microbatches, take_parts
from nvfp4_train.parallel.runtime import Runtime, start_runtime, stop_runtime
from nvfp4_train.parallel.stages import plan_stages
from nvfp4_train.precision.amax_history import named_histories
from nvfp4_train.precision.linear_rows import LinearCall
from nvfp4_train.precision.position import RoundingPosition
from tests.support.configs import composed
from tests.support.engines import add_gradients, build_tiny_engine, train
from tests.support.ranks import run_on_ranks
from tests.support.recipes import cast_recipe, nvfp4_recipe
from tests.support.tiny import SEQUENCE_LENGTH, parallel_layout, tiny_batches, tiny_model

NUM_MICROBATCHES = 4
FP32 = cast_recipe(ComputeDtype.fp32)
ZERO_BUBBLE = {"pp": 2, "schedule": "zero_bubble", "stages_per_rank": 2}
SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {"pp": 2},
    "gpipe": {"pp": 2, "schedule": "gpipe"},
    "interleaved": {"pp": 2, "schedule": "interleaved", "stages_per_rank": 2},
    "zero_bubble": {"pp": 2, "schedule": "zero_bubble"},
    "zero_bubble, interleaved": ZERO_BUBBLE,
    "zbv": {"pp": 2, "schedule": "zbv", "stages_per_rank": 2},
}


def hybrid(pattern: str = "M*-E", *, tie_embeddings: bool = False) -> ModelConfig:
    """Every kind of block, with routers that have penalties and move their corrections."""
    cfg = tiny_model(pattern, tie_embeddings=tie_embeddings)
    moe = replace(cfg.moe, auxiliary_loss_weight=0.01, z_loss_weight=0.001, bias_update_rate=0.01)
    return replace(cfg, moe=moe)


@contextmanager
def counted_gemms() -> Iterator[Counter[tuple[str, torch.dtype]]]:
    """Count the products of each Linear and of each expert by the dtype of the result: FP32 is that of wgrad."""
    counts: Counter[tuple[str, torch.dtype]] = Counter()
    original = LinearCall._multiply

    def multiply(call: LinearCall, a: Any, b: Any, out_dtype: torch.dtype) -> Tensor:
        counts[call.rounder.layer, out_dtype] += 1
        return original(call, a, b, out_dtype)

    LinearCall._multiply = multiply  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        LinearCall._multiply = original  # type: ignore[method-assign]


@contextmanager
def counted_starts() -> Iterator[Counter[str]]:
    counts: Counter[str] = Counter()
    original = RoundingPosition.start_microbatch

    def start(position: RoundingPosition, **places: int) -> None:
        counts["starts"] += 1
        original(position, **places)

    RoundingPosition.start_microbatch = start  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        RoundingPosition.start_microbatch = original  # type: ignore[method-assign]


def gradients_of(engine: Engine) -> dict[str, Tensor]:
    return {name: parameter.grad.full_tensor().clone() for name, parameter in engine.model.named_parameters()}


def first_step(runtime: Runtime, recipe: RecipeConfig, model: ModelConfig, **layout: Any) -> dict[str, Any]:
    """All that one step leaves behind on this rank."""
    engine = build_tiny_engine(runtime, recipe, model=model, parallel=parallel_layout(**layout))
    forwards: Counter[str] = Counter()
    for name, module in engine.model.named_modules():
        if isinstance(module, Block):
            module.register_forward_hook(lambda *_, name=name: forwards.update([name]))
    with counted_gemms() as gemms, counted_starts() as starts:
        loss = add_gradients(engine, 0)
    found: dict[str, Any] = {
        "loss": loss.item(),
        "gradients": gradients_of(engine),
        "gemms": dict(gemms),
        "forwards": dict(forwards),
        "starts": starts["starts"],
        "sent": {
            name: int(module.tokens_per_expert.sum())
            for name, module in engine.model.named_modules()
            if isinstance(module, Router)
        },
        "extra": {name: value.item() for name, value in engine.extra_losses.items()},
    }
    found["norm"] = engine.optimizer_step(lr=1e-3, weight_decay=0.1).item()
    found["next"] = train(engine, range(1, 3))
    found["evaluated"] = [
        engine.evaluate(tiny_batches(step=99)[0], forward=forward).loss_sum.item() for forward in Forward
    ]
    found["corrections"] = {
        name: buffer.tolist() for name, buffer in engine.model.named_buffers() if name.endswith("correction_bias")
    }
    found["histories"] = {name: tensor[:3].tolist() for name, tensor in named_histories(engine.model).items()}
    return found


def with_shared_embedding(runtime: Runtime, **layout: Any) -> dict[str, Any]:
    """Train a model whose ends share the embedding, and return this rank's copy of it and what it would log."""
    found: dict[str, Any] = {}
    for name, model in (("tied", hybrid("M*-E", tie_embeddings=True)), ("depths", hybrid("ME|*E/*E"))):
        engine = build_tiny_engine(runtime, FP32, model=model, parallel=parallel_layout(**layout))
        losses = train(engine, range(3))
        embedding = dict(engine.model.named_parameters()).get("embedding.weight")
        copy = None if embedding is None else embedding.full_tensor().detach().clone()
        extra = {key: value.item() for key, value in engine.extra_losses.items()}
        violations = expert_imbalance(engine.model, mesh=engine.mesh)
        imbalance = {key: value.item() for key, value in violations.items()}
        found[name] = {"losses": losses, "embedding": copy, "extra": extra, "imbalance": imbalance}
    return found


@cache
def single_ends(runtime: Runtime) -> dict[str, Any]:
    return with_shared_embedding(runtime)


def recomputed(runtime: Runtime, **layout: Any) -> dict[str, dict[str, Any]]:
    """Losses of two steps, and the GEMMs of both, by what is recomputed."""
    found = {}
    for mode in ActivationCheckpoint:
        parallel = parallel_layout(activation_checkpoint=mode, **layout)
        engine = build_tiny_engine(runtime, nvfp4_recipe(), model=hybrid(), parallel=parallel)
        with counted_gemms() as gemms:
            found[mode.value] = {"steps": train(engine, range(2)), "gemms": dict(gemms)}
    return found


def delayed() -> RecipeConfig:
    return composed("recipe=fp8_delayed").recipe


def work(runtime: Runtime) -> dict[str, Any]:
    found: dict[str, Any] = {name: first_step(runtime, FP32, hybrid(), **layout) for name, layout in SCHEDULES.items()}
    found["nvfp4"] = first_step(runtime, nvfp4_recipe(), hybrid(), **ZERO_BUBBLE)
    found["nvfp4, 1f1b"] = first_step(runtime, nvfp4_recipe(), hybrid(), pp=2)
    found["delayed"] = first_step(runtime, delayed(), hybrid(), pp=2)
    found["ends"] = with_shared_embedding(runtime, pp=2)
    found["recomputed"] = recomputed(runtime, **ZERO_BUBBLE)
    found["ramp"] = ramp(runtime)
    return found


def ramp(runtime: Runtime) -> list[float]:
    """Steps of two, four and two microbatches."""
    engine = build_tiny_engine(runtime, FP32, model=hybrid(), parallel=parallel_layout(pp=runtime.world_size))
    losses = []
    for step, number in enumerate((2, 4, 2)):
        batches = tiny_batches(step=step, num_microbatches=number)
        labels = torch.stack([batch.num_labels() for batch in batches]).sum().float()
        losses.append(engine.forward_backward(batches, labels).item())
        engine.optimizer_step(lr=1e-3, weight_decay=0.0)
    return losses


def sharded_work(runtime: Runtime) -> dict[str, Any]:
    """Sharded stages, and copies of them."""
    found: dict[str, Any] = {}
    layouts: dict[str, dict[str, Any]] = {
        "sharded": {**SCHEDULES["1f1b"], "shard": 2},
        "sharded, apart": {**ZERO_BUBBLE, "shard": 2},
        "copies": {**SCHEDULES["zero_bubble"], "replicate": 2},
    }
    for name, layout in layouts.items():
        recipe = cast_recipe(ComputeDtype.bf16)
        engine = build_tiny_engine(runtime, recipe, model=hybrid(), parallel=parallel_layout(**layout))
        add_gradients(engine, 0)
        found[name] = {
            "gathered": [key for key, value in engine.model.named_parameters() if not hasattr(value, "placements")],
            "gradients": gradients_of(engine),
            "norm": engine.optimizer_step(lr=1e-3, weight_decay=0.1).item(),
        }
    return found


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    yield start_runtime(Device.cpu)
    stop_runtime()


@cache
def ranks() -> list[dict[str, Any]]:
    return run_on_ranks(work, 2, timeout_seconds=300)


def together(name: str, key: str) -> dict[str, Any]:
    """Return what the ranks have, none of it twice."""
    first, second = (rank[name][key] for rank in ranks())
    assert not first.keys() & second.keys()
    return first | second


@pytest.fixture(scope="module")
def single(runtime) -> dict[str, Any]:
    return first_step(runtime, FP32, hybrid())


@pytest.mark.distributed
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_are_those_of_one_process_bit_for_bit(single, schedule):
    """Every sum is taken in the same order on whatever rank, however apart its GEMM was run."""
    found = together(schedule, "gradients")
    assert found.keys() == single["gradients"].keys()
    different = [name for name, gradient in found.items() if not torch.equal(gradient, single["gradients"][name])]
    assert different == []
    for rank in ranks():
        assert rank[schedule]["loss"] == single["loss"]
        assert rank[schedule]["norm"] == pytest.approx(single["norm"], rel=1e-6)


@pytest.mark.distributed
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nothing_is_computed_to_find_out_shapes(single, schedule):
    """Neither a forward nor a count more than one process has."""
    assert together(schedule, "forwards") == single["forwards"]
    assert set(single["forwards"].values()) == {NUM_MICROBATCHES}
    assert together(schedule, "sent") == single["sent"]
    num_stages = SCHEDULES[schedule].get("stages_per_rank", 1)
    # one more to learn the shape of a microbatch
    assert {rank[schedule]["starts"] for rank in ranks()} == {NUM_MICROBATCHES * num_stages + 1}


@pytest.mark.distributed
@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name.startswith(("zero", "zbv"))])
def test_each_gemm_runs_once_per_microbatch_with_weight_gradients_apart(single, schedule):
    gemms = together(schedule, "gemms")
    assert gemms == single["gemms"]
    # in FP32 the three of a Linear are told by nothing; experts run grouped GEMMs
    assert set(gemms.values()) == {3 * NUM_MICROBATCHES}


@pytest.mark.distributed
def test_each_quantized_gemm_runs_once_per_microbatch_with_weight_gradients_apart(runtime):
    alone = first_step(runtime, nvfp4_recipe(), hybrid())
    gemms = together("nvfp4", "gemms")
    assert gemms == together("nvfp4, 1f1b", "gemms") == alone["gemms"]
    linears = {name: count for name, count in gemms.items() if ".experts." not in name[0]}
    assert {count for (_, dtype), count in linears.items() if dtype is torch.float32} == {NUM_MICROBATCHES}
    assert {count for (_, dtype), count in linears.items() if dtype is torch.bfloat16} == {2 * NUM_MICROBATCHES}
    for name, gradient in together("nvfp4", "gradients").items():
        assert torch.equal(gradient, alone["gradients"][name]), name


@pytest.mark.distributed
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_steps_evaluations_and_balance_follow_one_process(single, schedule):
    for rank in ranks():
        assert rank[schedule]["next"] == ranks()[0][schedule]["next"]
        for found, expected in zip(rank[schedule]["next"], single["next"], strict=True):
            assert found == pytest.approx(expected, rel=1e-5)
        assert rank[schedule]["evaluated"] == pytest.approx(single["evaluated"], rel=1e-5)
    assert together(schedule, "corrections") == single["corrections"]
    assert any(any(values) for values in single["corrections"].values())


@pytest.mark.distributed
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_ranks_know_the_extra_losses(single, schedule):
    assert single["extra"].keys() == {"router"}
    for rank in ranks():
        assert rank[schedule]["extra"] == pytest.approx(single["extra"], rel=1e-6)


@pytest.mark.distributed
def test_all_ranks_know_what_experts_of_every_stage_and_of_multi_token_prediction_do(runtime):
    alone = single_ends(runtime)["depths"]
    assert list(alone["extra"]) == ["mtp_1", "router"]
    blocks = ("blocks.1", "blocks.3", "mtp.0.blocks.1")
    assert list(alone["imbalance"]) == [f"{block}.mixer.router" for block in blocks]
    for rank in ranks():
        found = rank["ends"]["depths"]
        assert found["extra"] == pytest.approx(alone["extra"], rel=1e-5)
        assert list(found["extra"]) == list(alone["extra"])
        assert found["imbalance"] == alone["imbalance"]
        assert list(found["imbalance"]) == list(alone["imbalance"])


@pytest.mark.distributed
def test_a_history_of_maxima_lives_with_its_layer(runtime):
    alone = first_step(runtime, delayed(), hybrid())
    found = together("delayed", "histories")
    assert found.keys() == alone["histories"].keys()
    for name, values in found.items():
        assert values == pytest.approx(alone["histories"][name], rel=2e-2), name
        assert values[0] > 0


@pytest.mark.distributed
@pytest.mark.parametrize("model", ["tied", "depths"])
def test_both_ends_keep_equal_copies_of_the_embedding(runtime, model):
    first, last = (rank["ends"][model] for rank in ranks())
    assert torch.equal(first["embedding"], last["embedding"])
    assert first["losses"] == last["losses"]
    alone = single_ends(runtime)[model]
    for found, expected in zip(first["losses"], alone["losses"], strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.distributed
def test_what_is_recomputed_rounds_as_it_did_though_other_microbatches_came_between():
    for rank in ranks():
        steps = {mode: found["steps"] for mode, found in rank["recomputed"].items()}
        assert steps["block"] == steps["selective"] == steps["none"]


@pytest.mark.distributed
def test_recomputing_runs_forwards_once_more_and_weight_gradients_that_wait_once():
    experts = 0
    for rank in ranks():
        plain, again = (rank["recomputed"][mode]["gemms"] for mode in ("none", "block"))
        assert again.keys() == plain.keys()
        for (layer, dtype), count in plain.items():
            # FP32 are the weight gradients; of the others one is that of the inputs
            extra = count // 2 if dtype is torch.bfloat16 and layer.startswith("blocks.") else 0
            assert again[layer, dtype] == count + extra, (layer, dtype)
            experts += ".experts." in layer
    assert experts


@pytest.mark.distributed
def test_the_number_of_microbatches_may_change_between_steps(runtime):
    for rank in ranks():
        assert rank["ramp"] == pytest.approx(ramp(runtime), rel=1e-6)


@pytest.mark.distributed
def test_data_ranks_exchange_the_gradients_of_a_stage_once_and_in_fp32(runtime):
    """Twice would double what was there before, and BF16 would be off by more than this."""
    alone = first_step(runtime, cast_recipe(ComputeDtype.bf16), hybrid())
    for rank in run_on_ranks(sharded_work, 4, timeout_seconds=300):
        for found in rank.values():
            assert found["norm"] == pytest.approx(alone["norm"], rel=1e-5)
            assert found["gathered"] == []
            for key, gradient in found["gradients"].items():
                torch.testing.assert_close(gradient, alone["gradients"][key], rtol=1e-4, atol=1e-6, msg=key)


def test_the_parts_of_all_ranks_are_the_model_once():
    with torch.device("meta"):
        model = build_model(hybrid("M*-EM-"))
    cfg = parallel_layout(pp=2, schedule="interleaved", stages_per_rank=2)
    plans = plan_stages(model, cfg, sequence_length=SEQUENCE_LENGTH)
    owned = [take_parts(model, plans, rank=rank) for rank in range(2)]
    names = [name for parts in owned for name, _ in parts.model.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    for parts in owned:
        assert len(parts.stages) == 2
        held = [name for stage in parts.stages for name, _ in stage.named_parameters()]
        assert sorted(held) == sorted(name for name, _ in parts.model.named_parameters())
        for name, parameter in parts.model.named_parameters():
            assert parameter is model.get_parameter(name)


def test_too_few_microbatches_for_the_ranks_that_there_are(runtime):
    cfg = parallel_layout()
    mesh = build_mesh(cfg, runtime)
    batch = composed("experiment=tiny").batch
    check_microbatches(batch, cfg, mesh)

    class TwoStages:
        dp_degree = 4

        def degree(self, axis: str) -> int:
            return {"pp": 2}.get(axis, 1)

    with pytest.raises(ConfigError, match=r"batch.global_batch_size = 4\n.*needs at least 2"):
        check_microbatches(replace(batch, micro_batch_size=1, global_batch_size=4), cfg, TwoStages())  # type: ignore[arg-type]
