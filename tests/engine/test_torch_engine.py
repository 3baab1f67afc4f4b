"""Training on several ranks is training on one, and training again is training the same."""

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_train.checkpoint.state import collect_state
from nvfp4_train.config.model import ModelConfig
from nvfp4_train.config.parallel import ActivationCheckpoint
from nvfp4_train.config.recipe import ComputeDtype
from nvfp4_train.config.run import Device
from nvfp4_train.engine.base import Engine, Forward
from nvfp4_train.model.router import max_violations
from nvfp4_train.parallel.runtime import Runtime, start_runtime, stop_runtime
from nvfp4_train.precision.operands import OperandRounder
from tests.support.engines import add_gradients, build_tiny_engine, step_batches, train, whole_parameters
from tests.support.ranks import run_on_ranks
from tests.support.recipes import cast_recipe, nvfp4_recipe
from tests.support.tiny import SEQUENCE_LENGTH, VOCAB_SIZE, parallel_layout, tiny_batches, tiny_model

NUM_STEPS = 11
SAVED_STEP = 3


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    yield start_runtime(Device.cpu)
    stop_runtime()


@contextmanager
def recorded_rounding() -> Iterator[dict[tuple[str, str, int], tuple[str, object]]]:
    """Collect a digest and the random stream of every rounded operand, by layer, operand and first token."""
    found: dict[tuple[str, str, int], tuple[str, object]] = {}
    originals = OperandRounder.round, OperandRounder.store, OperandRounder.store_both

    def note(rounder: OperandRounder, name: str, tensors: tuple[Tensor, ...]) -> None:
        if rounder.specs[name].is_quantized:
            digest = hashlib.blake2b()
            for tensor in tensors:
                digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
            first_token = -1 if name.endswith(".w") else rounder.offsets["tokens"]
            found[rounder.layer, name, first_token] = (digest.hexdigest(), rounder.stream(name))

    def rounded(rounder: OperandRounder, name: str, tensor: Tensor) -> Any:
        operand = originals[0](rounder, name, tensor)
        note(rounder, name, (operand.values, operand.amax))
        return operand

    def stored(rounder: OperandRounder, name: str, tensor: Tensor) -> Any:
        operand = originals[1](rounder, name, tensor)
        note(rounder, name, operand.tensors)
        return operand

    def stored_both(rounder: OperandRounder, row: str, column: str, tensor: Tensor) -> Any:
        operands = originals[2](rounder, row, column, tensor)
        for name, operand in zip((row, column), operands, strict=True):
            note(rounder, name, operand.tensors)
        return operands

    patched = rounded, stored, stored_both
    OperandRounder.round, OperandRounder.store, OperandRounder.store_both = patched  # type: ignore[method-assign]
    try:
        yield found
    finally:
        OperandRounder.round, OperandRounder.store, OperandRounder.store_both = originals  # type: ignore[method-assign]


def optimizer_state(engine: Engine) -> dict[str, Tensor]:
    state = collect_state(engine.model, engine._optimizer)["optimizer"]
    return {
        f"{name}.{key}": (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
        for name, values in state.items()
        for key, value in values.items()
    }


def model_with_experts() -> ModelConfig:
    """Every kind of block, shared multi-token prediction, and all ways to balance experts at once."""
    cfg = tiny_model("M-*E/*E/*E")
    moe = replace(cfg.moe, auxiliary_loss_weight=0.01, z_loss_weight=0.001, bias_update_rate=0.01)
    return replace(cfg, moe=moe, mtp=replace(cfg.mtp, share_depths=True))


def corrections(engine: Engine) -> dict[str, list[float]]:
    state = collect_state(engine.model, engine._optimizer)["model"]
    return {name: value.tolist() for name, value in state.items() if name.endswith("e_score_correction_bias")}


def train_everything(runtime: Runtime, folder: Path) -> dict[str, Any]:
    """All that the tests ask of one layout, so that ranks start once."""
    found: dict[str, Any] = {}
    fp32 = build_tiny_engine(runtime, cast_recipe(ComputeDtype.fp32))
    found["fp32"] = train(fp32, range(NUM_STEPS))
    found["tied"] = train(
        build_tiny_engine(runtime, cast_recipe(ComputeDtype.fp32), model=tiny_model(tie_embeddings=True)), range(4)
    )
    modes = {"experts": "none", "checkpointed": "block", "products_kept": "selective"}
    for key, checkpointing in ((key, ActivationCheckpoint(mode)) for key, mode in modes.items()):
        engine = build_tiny_engine(
            runtime,
            cast_recipe(ComputeDtype.fp32),
            model=model_with_experts(),
            parallel=parallel_layout(activation_checkpoint=checkpointing),
        )
        found[key] = train(engine, range(3))
        found[f"{key}_corrections"] = corrections(engine)
        found[f"{key}_extra_losses"] = {name: loss.item() for name, loss in engine.extra_losses.items()}
        found[f"{key}_imbalance"] = {name: value.item() for name, value in max_violations(engine.model).items()}
    nvfp4 = build_tiny_engine(runtime, nvfp4_recipe())
    with recorded_rounding() as found["rounding"]:
        found["nvfp4"] = train(nvfp4, range(1))
    found["nvfp4"] += train(nvfp4, range(1, SAVED_STEP))
    nvfp4.save(folder / f"{runtime.world_size}_ranks/step_00000003", {"tokens": 384})
    found["saved_masters"], found["saved_optimizer"] = whole_parameters(nvfp4), optimizer_state(nvfp4)
    found["evaluated"] = [
        (float(losses.loss_sum), int(losses.num_labels))
        for forward in Forward
        for losses in [nvfp4.evaluate(tiny_batches(step=99)[runtime.rank], forward=forward)]
    ]
    found["nvfp4"] += train(nvfp4, range(SAVED_STEP, NUM_STEPS))
    return found


def poison_one_rank(engine: Engine, runtime: Runtime) -> dict[str, Any]:
    """Put a NaN into one gradient of the last rank."""
    before, state = whole_parameters(engine), optimizer_state(engine)
    add_gradients(engine, 50)
    if runtime.rank == runtime.world_size - 1:
        next(p for p in engine.model.parameters() if p.to_local().numel()).grad.to_local()[-1] = float("nan")
    norm = engine.optimizer_step(lr=1e-2, weight_decay=0.1).item()
    after, state_after = whole_parameters(engine), optimizer_state(engine)
    return {
        "norm": norm,
        "unchanged": all(torch.equal(before[name], after[name]) for name in before)
        and all(torch.equal(state[name], state_after[name]) for name in state),
        "step": engine.step,
        "next": train(engine, range(51, 52)),
    }


def run_two_ranks(runtime: Runtime, folder: Path) -> dict[str, Any]:
    found = train_everything(runtime, folder)
    resharded = build_tiny_engine(runtime, nvfp4_recipe(), seed=7)
    found["metadata"] = resharded.load(folder / "1_ranks/step_00000003")
    found["loaded_masters"], found["loaded_optimizer"] = whole_parameters(resharded), optimizer_state(resharded)
    resharded._position.seed = 0
    found["continued"] = train(resharded, range(SAVED_STEP, SAVED_STEP + 2))
    found["replicated"] = train(
        build_tiny_engine(runtime, cast_recipe(ComputeDtype.fp32), parallel=parallel_layout(replicate=2)), range(4)
    )
    found["poisoned"] = poison_one_rank(resharded, runtime)
    return found


def run_four_ranks(runtime: Runtime) -> list[tuple[float, float]]:
    recipe = cast_recipe(ComputeDtype.fp32)
    return train(build_tiny_engine(runtime, recipe, parallel=parallel_layout(replicate=2, shard=2)), range(4))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def one(runtime, folder) -> dict[str, Any]:
    return train_everything(runtime, folder)


@pytest.fixture(scope="module")
def two(one, folder) -> list[dict[str, Any]]:
    return run_on_ranks(run_two_ranks, 2, folder)


def assert_close(found: list[tuple[float, float]], expected: list[tuple[float, float]], *, rel: float) -> None:
    assert len(found) <= len(expected)
    for step, (values, wanted) in enumerate(zip(found, expected, strict=False)):
        assert values == pytest.approx(wanted, rel=rel), f"step {step}"


def test_the_same_step_again_and_again_is_learnt(runtime):
    losses = [loss for loss, _ in train(build_tiny_engine(runtime, nvfp4_recipe()), [0] * 10)]
    assert losses[0] == pytest.approx(math.log(VOCAB_SIZE), rel=0.05)
    assert losses[-1] < losses[0] - 0.2


@pytest.mark.distributed
def test_two_ranks_train_as_one_in_fp32(one, two):
    for found in two:
        assert_close(found["fp32"], one["fp32"], rel=1e-5)
        assert_close(found["tied"], one["tied"], rel=1e-5)
        assert_close(found["replicated"], one["fp32"], rel=1e-5)
        assert_close(found["experts"], one["experts"], rel=1e-5)


@pytest.mark.distributed
def test_experts_are_balanced_over_all_ranks(one, two):
    wanted = one["experts_corrections"]
    assert sorted(wanted) == [
        f"{block}.mixer.router.e_score_correction_bias" for block in ("blocks.3", "mtp.0.blocks.1")
    ]
    assert all(any(values) for values in wanted.values())
    assert all(found["experts_corrections"] == wanted for found in two)


@pytest.mark.distributed
def test_extra_losses_and_imbalance_are_those_of_all_ranks(one, two):
    wanted = one["experts_extra_losses"]
    assert wanted.keys() == {"mtp_1", "mtp_2", "router"}
    assert 0 < wanted["router"] < 1
    assert all(1 < wanted[name] < 1.2 * math.log(VOCAB_SIZE) for name in ("mtp_1", "mtp_2"))
    assert one["experts_imbalance"].keys() == {"blocks.3.mixer.router", "mtp.0.blocks.1.mixer.router"}
    for found in two:
        assert found["experts_extra_losses"] == pytest.approx(wanted, rel=1e-5)
        assert found["experts_imbalance"] == one["experts_imbalance"]


def test_checkpointing_changes_no_bit_of_training(one):
    for key in ("checkpointed", "products_kept"):
        assert one[key] == one["experts"]
        assert one[f"{key}_corrections"] == one["experts_corrections"]
        assert one[f"{key}_extra_losses"] == one["experts_extra_losses"]
        assert one[f"{key}_imbalance"] == one["experts_imbalance"]


@pytest.mark.distributed
def test_four_ranks_train_as_one_in_a_hybrid_of_shards_and_copies(one):
    results = run_on_ranks(run_four_ranks, 4)
    assert all(found == results[0] for found in results)
    assert_close(results[0], one["fp32"], rel=1e-5)


@pytest.mark.distributed
def test_losses_and_norms_are_bitwise_equal_on_all_ranks(two):
    for key in (
        "fp32",
        "tied",
        "experts",
        "checkpointed",
        "products_kept",
        "nvfp4",
        "replicated",
        "continued",
        "evaluated",
    ):
        assert two[0][key] == two[1][key], key


def test_gradients_are_exchanged_once_a_step_and_not_once_a_microbatch(runtime):
    """A sharded gradient appears with an exchange; none may be there when the last microbatch starts."""
    engine = build_tiny_engine(runtime, nvfp4_recipe())
    exchanged: list[list[str]] = []

    def look(model: torch.nn.Module, args: object) -> None:
        parameters = model.named_parameters()
        exchanged.append([name for name, p in parameters if hasattr(p, "placements") and p.grad is not None])

    engine.model.register_forward_pre_hook(look)
    add_gradients(engine, 0)
    assert exchanged == [[]] * 4
    assert all(parameter.grad is not None for parameter in engine.model.parameters())


@pytest.mark.distributed
def test_rounding_of_the_first_step_is_bitwise_that_of_one_rank(one, two):
    """Every operand of every microbatch, and the stream of its random bytes: whichever rank holds it."""
    together = two[0]["rounding"] | two[1]["rounding"]
    assert together == one["rounding"]
    tokens = {first_token for _, _, first_token in together}
    assert tokens == {-1, *(index * SEQUENCE_LENGTH for index in range(4))}
    stochastic = [key for key, (_, stream) in together.items() if stream is not None]
    assert {name for _, name, _ in stochastic} == {"dgrad.dy", "wgrad.dy"}
    tokens_by_rank = [{first for _, _, first in found["rounding"]} for found in two]
    assert tokens_by_rank == [{-1, 0, 64}, {-1, 32, 96}]


@pytest.mark.distributed
def test_two_ranks_train_as_one_in_nvfp4(one, two):
    """From the second step on masters differ by FP32 rounding, which at times moves a value across a boundary."""
    assert two[0]["nvfp4"][0] == pytest.approx(one["nvfp4"][0], rel=1e-6)
    assert_close(two[0]["nvfp4"], one["nvfp4"], rel=2e-3)


def test_a_second_run_is_bitwise_the_same(runtime, one):
    assert train(build_tiny_engine(runtime, nvfp4_recipe()), range(NUM_STEPS)) == one["nvfp4"]


def test_a_run_continued_from_a_checkpoint_is_bitwise_the_unbroken_one(runtime, one, folder):
    fresh = build_tiny_engine(runtime, nvfp4_recipe())
    train(fresh, range(60, 62))  # whatever it did before is forgotten
    fresh.evaluate(tiny_batches(step=0)[0], forward=Forward.recipe)
    assert fresh.load(folder / "1_ranks/step_00000003") == {"tokens": 384}
    assert fresh.step == SAVED_STEP
    assert train(fresh, range(SAVED_STEP, NUM_STEPS)) == one["nvfp4"][SAVED_STEP:]


def assert_same_tensors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.mark.distributed
def test_a_checkpoint_of_one_rank_loads_on_two(one, two):
    for found in two:
        assert found["metadata"] == {"tokens": 384}
        assert_same_tensors(found["loaded_masters"], one["saved_masters"])
        assert_same_tensors(found["loaded_optimizer"], one["saved_optimizer"])
    assert_close(two[0]["continued"][:1], one["nvfp4"][SAVED_STEP:], rel=1e-6)


@pytest.mark.distributed
def test_a_checkpoint_of_two_ranks_loads_on_one(runtime, two, folder):
    engine = build_tiny_engine(runtime, nvfp4_recipe())
    engine.load(folder / "2_ranks/step_00000003")
    assert_same_tensors(whole_parameters(engine), two[0]["saved_masters"])
    assert_same_tensors(optimizer_state(engine), two[0]["saved_optimizer"])
    assert_close(train(engine, range(SAVED_STEP, SAVED_STEP + 1)), two[0]["nvfp4"][SAVED_STEP:], rel=1e-6)


@pytest.mark.distributed
def test_a_non_finite_gradient_of_one_rank_is_skipped_by_all(two):
    for found in two:
        poisoned = found["poisoned"]
        assert math.isnan(poisoned["norm"])
        assert poisoned["unchanged"]
        assert poisoned["step"] == SAVED_STEP + 3
        assert all(math.isfinite(value) for value in poisoned["next"][0])


def test_a_skipped_step_is_remembered_by_a_resumed_run(runtime, tmp_path):
    """The step counts, so the random bytes of the steps after it are those of the unbroken run."""
    engine = build_tiny_engine(runtime, nvfp4_recipe())
    train(engine, range(2))
    add_gradients(engine, 2)
    next(engine.model.parameters()).grad.to_local().fill_(float("inf"))
    assert engine.optimizer_step(lr=1e-2, weight_decay=0.1).isinf()
    engine.save(tmp_path / "step_00000003", {})
    unbroken = train(engine, range(3, 5))
    resumed = build_tiny_engine(runtime, nvfp4_recipe())
    resumed.load(tmp_path / "step_00000003")
    assert train(resumed, range(3, 5)) == unbroken


@pytest.mark.distributed
def test_an_evaluation_is_summed_over_ranks(runtime, one, two, folder):
    engine = build_tiny_engine(runtime, nvfp4_recipe())
    engine.load(folder / "2_ranks/step_00000003")
    for index, forward in enumerate(Forward):
        parts = [engine.evaluate(batch, forward=forward) for batch in tiny_batches(step=99)[:2]]
        loss_sum, num_labels = two[0]["evaluated"][index]
        assert loss_sum == pytest.approx(sum(part.loss_sum.item() for part in parts), rel=1e-6)
        assert num_labels == sum(part.num_labels.item() for part in parts) == 2 * (SEQUENCE_LENGTH - 1)
    assert one["evaluated"][0][0] != one["evaluated"][1][0]


def test_an_evaluation_in_bf16_is_the_bf16_recipe_on_the_same_weights(runtime):
    quantized = build_tiny_engine(runtime, nvfp4_recipe())
    plain = build_tiny_engine(runtime, cast_recipe(ComputeDtype.bf16))
    batch = tiny_batches(step=5)[0]
    in_bf16 = quantized.evaluate(batch, forward=Forward.bf16)
    assert torch.equal(in_bf16.loss_sum, plain.evaluate(batch, forward=Forward.recipe).loss_sum)
    assert not torch.equal(in_bf16.loss_sum, quantized.evaluate(batch, forward=Forward.recipe).loss_sum)


def test_evaluations_do_not_disturb_training(runtime, one):
    engine = build_tiny_engine(runtime, nvfp4_recipe())
    found = []
    for step in range(4):
        for forward in Forward:
            engine.evaluate(tiny_batches(step=70 + step)[1], forward=forward)
        found += train(engine, range(step, step + 1))
    assert found == one["nvfp4"][:4]


def test_the_update_is_adamw_of_the_clipped_gradient(runtime):
    """Against AdamW on plain tensors; the first step's gradient norm is above the limit of 1."""
    engine = build_tiny_engine(runtime, cast_recipe(ComputeDtype.fp32))
    before = whole_parameters(engine)
    add_gradients(engine, 0)
    gradients = {name: parameter.grad.full_tensor().clone() for name, parameter in engine.model.named_parameters()}
    norm = engine.optimizer_step(lr=1e-2, weight_decay=0.1)
    assert norm > 1
    total = torch.stack([gradient.double().square().sum() for gradient in gradients.values()]).sum().sqrt()
    assert norm.item() == pytest.approx(total.item(), rel=1e-5)
    for name, found in whole_parameters(engine).items():
        decay = 0.1 if before[name].ndim > 1 else 0.0
        clipped = gradients[name] / norm
        expected = before[name] * (1 - 1e-2 * decay) - 1e-2 * clipped / (clipped.abs() + 1e-8)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_close_frees_gradients_and_gathered_weights(runtime):
    engine = build_tiny_engine(runtime, cast_recipe(ComputeDtype.bf16))
    add_gradients(engine, 0)
    engine.close()
    assert all(parameter.grad is None for parameter in engine.model.parameters())
    assert step_batches(engine, 0)
