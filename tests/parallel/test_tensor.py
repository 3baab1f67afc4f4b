"""Layers that two ranks share compute what one process computes; without experts, bit for bit also in NVFP4."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from nvfp4_train.config.model import ModelConfig, NormGroup, Position
from nvfp4_train.config.moe import Activation
from nvfp4_train.config.parallel import ActivationCheckpoint, Compile, ReduceDtype
from nvfp4_train.config.recipe import ComputeDtype, RecipeConfig
from nvfp4_train.config.run import Device
from nvfp4_train.data.batch import Batch
from nvfp4_train.engine.base import Forward
from nvfp4_train.numerics.spec import Block, Format, GlobalScale, OperandSpec, Rounding
from nvfp4_train.parallel.compile import compile_blocks
from nvfp4_train.parallel.runtime import Runtime, start_runtime, stop_runtime
from tests.support.engines import add_gradients, build_tiny_engine, step_batches, train, whole_parameters
from tests.support.operands import OperandName, RoundedOperand, is_equal, recorded_operands
from tests.support.ranks import run_on_ranks
from tests.support.recipes import cast_recipe, nvfp4_recipe, nvfp4_table
from tests.support.tiny import SEQUENCE_LENGTH, parallel_layout, tiny_batches, tiny_model

SPLIT = parallel_layout(tp=2)
WHOLE_TOKENS = parallel_layout(tp=2, sequence_parallel=False)
FP32 = cast_recipe(ComputeDtype.fp32)


def every_option() -> ModelConfig:
    """Gates, biases, norms of heads, rotation, latent experts, penalties, tied embeddings, an FP32 residual stream."""
    cfg = tiny_model("M*-E/*E/*E", tie_embeddings=True)
    return replace(
        cfg,
        residual_fp32=True,
        mamba=replace(cfg.mamba, proj_bias=True),
        attention=replace(
            cfg.attention, qk_norm=True, qkv_bias=True, output_bias=True, position=Position.rope, window_tokens=12
        ),
        mlp=replace(cfg.mlp, activation=Activation.swiglu, bias=True),
        moe=replace(
            cfg.moe, activation=Activation.swiglu, d_latent=32, shared_d_ff=64,
            auxiliary_loss_weight=0.01, z_loss_weight=0.001, bias_update_rate=0.01,
        ),
        mtp=replace(cfg.mtp, share_depths=True),
    )  # fmt: skip


def row_scaled_recipe() -> RecipeConfig:
    """One FP32 scale per row of the forward's operands, which only some of the ranks must agree on."""
    row = OperandSpec(
        format=Format.nvfp4, block=Block.row_1x16, rounding=Rounding.nearest_even, global_scale=GlobalScale.row
    )
    table = nvfp4_table()
    fprop = replace(table.fprop, x=row, w=row)
    return nvfp4_recipe(replace(table, fprop=fprop, dgrad=replace(table.dgrad, w=row)))


@dataclass(kw_only=True)
class Trained:
    """Losses and gradient norms, the operands of the first step, and the parameters at the end."""

    steps: list[tuple[float, float]]
    operands: dict[OperandName, RoundedOperand]
    parameters: dict[str, Tensor]


def run(runtime: Runtime, recipe: RecipeConfig, model: ModelConfig, layout: Any) -> Trained:
    """Two steps of two microbatches: the second of each is not the first to be added to."""
    engine = build_tiny_engine(runtime, recipe, model=model, parallel=layout)
    with recorded_operands(tokens_per_microbatch=SEQUENCE_LENGTH) as operands:
        steps = train(engine, range(1), num_microbatches=2)
    steps += train(engine, range(1, 2), num_microbatches=2)
    return Trained(steps=steps, operands=operands, parameters=whole_parameters(engine))


def logits_of(runtime: Runtime, layout: Any, model: ModelConfig) -> list[Tensor]:
    """Logits of a batch, of one whose second document is another, and of one whose padding is."""
    engine = build_tiny_engine(runtime, nvfp4_recipe(), model=model, parallel=layout)
    batch = tiny_batches(step=0)[0]
    second = batch.document_ids == 1
    found = []
    for tokens in (batch.tokens, torch.where(second, (batch.tokens + 7) % 64, batch.tokens)):
        with torch.no_grad():
            engine._position.high_precision = True  # a quantized tensor has one scale for all documents
            found.append(engine.model(tokens, document_ids=batch.document_ids, position_ids=batch.position_ids))
    return found


def losses_with_padding(runtime: Runtime, layout: Any, model: ModelConfig) -> list[float]:
    """Of a batch whose second document is padding, without labels, and of other padding."""
    engine = build_tiny_engine(runtime, FP32, model=model, parallel=layout)
    batch = step_batches(engine, 0)[0]
    second = batch.document_ids == 1
    labels = torch.where(second, -100, batch.labels)
    found = []
    for fill in (0, 5):
        tokens = torch.where(second, fill, batch.tokens)
        padded = Batch(
            tokens=tokens, labels=labels, document_ids=batch.document_ids, position_ids=batch.position_ids,
            microbatch_index=0,
        )  # fmt: skip
        found.append(engine.evaluate(padded, forward=Forward.recipe).loss_sum.item())
    return found


def gradients_of(runtime: Runtime, layout: Any, model: ModelConfig) -> dict[str, Tensor]:
    """Gradients of the first step, and its loss."""
    engine = build_tiny_engine(runtime, FP32, model=model, parallel=layout)
    found = {"loss": add_gradients(engine, 0)}
    return found | {name: value.grad.full_tensor().clone() for name, value in engine.model.named_parameters()}


def plain_and_compiled(runtime: Runtime, model: ModelConfig) -> tuple[Trained, Trained]:
    """Without code generation: what the compiler captured."""
    plain = run(runtime, nvfp4_recipe(), model, SPLIT)
    torch._dynamo.reset()
    captured = partial(compile_blocks, backend="aot_eager")
    with patch("nvfp4_train.parallel.apply.compile_blocks", captured):
        return plain, run(runtime, nvfp4_recipe(), model, parallel_layout(tp=2, compile=Compile.block))


DENSE = tiny_model("M*-/*")
TIED = tiny_model("-*", tie_embeddings=True)
HYBRID = replace(tiny_model("M*-E"), moe=replace(tiny_model().moe, shared_d_ff=64))
WHOLE_NORM = tiny_model("MM-")
WHOLE_NORM = replace(WHOLE_NORM, mamba=replace(WHOLE_NORM.mamba, norm_group=NormGroup.whole))
LATENT = replace(
    tiny_model("EM"), moe=replace(HYBRID.moe, d_latent=32, auxiliary_loss_weight=0.01, z_loss_weight=0.001)
)


def run_cases(runtime: Runtime) -> dict[str, Any]:
    block = ActivationCheckpoint.block
    selective = ActivationCheckpoint.selective
    return {
        "every_option": run(runtime, FP32, every_option(), SPLIT),
        "every_option_whole_tokens": run(runtime, FP32, every_option(), WHOLE_TOKENS),
        "dense": run(runtime, nvfp4_recipe(), DENSE, SPLIT),
        "dense_whole_tokens": run(runtime, nvfp4_recipe(), DENSE, WHOLE_TOKENS),
        "tied": run(runtime, nvfp4_recipe(), TIED, SPLIT),
        "rows": run(runtime, row_scaled_recipe(), DENSE, SPLIT),
        "in_bf16": run(runtime, nvfp4_recipe(), HYBRID, parallel_layout(tp=2, tp_reduce_dtype=ReduceDtype.bf16)),
        "hybrid": run(runtime, nvfp4_recipe(), HYBRID, SPLIT),
        "hybrid_whole_tokens": run(runtime, nvfp4_recipe(), HYBRID, WHOLE_TOKENS),
        "latent": run(runtime, nvfp4_recipe(), LATENT, SPLIT),
        "again": run(runtime, nvfp4_recipe(), HYBRID, SPLIT),
        "checkpointed": run(runtime, nvfp4_recipe(), HYBRID, parallel_layout(tp=2, activation_checkpoint=block)),
        "products_kept": run(runtime, nvfp4_recipe(), HYBRID, parallel_layout(tp=2, activation_checkpoint=selective)),
        "compiled": plain_and_compiled(runtime, tiny_model("M-")),
        "whole_norm": gradients_of(runtime, SPLIT, WHOLE_NORM),
        "whole_norm_recomputed": gradients_of(runtime, parallel_layout(tp=2, activation_checkpoint=block), WHOLE_NORM),
        "logits": logits_of(runtime, SPLIT, HYBRID),
        "padding": losses_with_padding(runtime, SPLIT, HYBRID),
    }


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    yield start_runtime(Device.cpu)
    stop_runtime()


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_on_ranks(run_cases, 2, timeout_seconds=300)


@pytest.mark.distributed
@pytest.mark.parametrize("case", ["every_option", "every_option_whole_tokens"])
def test_every_option_of_the_model_trains_as_in_one_process(runtime, ranks, case):
    one = run(runtime, FP32, every_option(), parallel_layout())
    for found in ranks:
        for step, expected in zip(found[case].steps, one.steps, strict=True):
            assert step == pytest.approx(expected, rel=1e-5)
        assert found[case].parameters.keys() == one.parameters.keys()
        differences = {
            name: (found[case].parameters[name] - one.parameters[name]).abs().max().item() for name in one.parameters
        }
        # One step of Adam moves a value by 3e-3; rounding may turn a tiny gradient around.
        assert max(differences.values()) < 2 * 3e-3


@pytest.mark.distributed
def test_a_norm_over_the_whole_width_sums_squares_and_gradients_of_all_ranks(runtime, ranks):
    one = gradients_of(runtime, parallel_layout(), WHOLE_NORM)
    in_groups = gradients_of(runtime, parallel_layout(), tiny_model("MM-"))  # it matters which channels share a mean
    assert one["loss"].item() != pytest.approx(in_groups["loss"].item(), rel=1e-4)
    for found in ranks:
        assert found["whole_norm"].keys() == one.keys()
        for name, value in found["whole_norm"].items():
            torch.testing.assert_close(value, one[name], rtol=1e-5, atol=1e-6, msg=name)
            assert torch.equal(value, found["whole_norm_recomputed"][name]), name


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("case", "recipe", "model"),
    [
        ("dense", nvfp4_recipe(), DENSE),
        ("dense_whole_tokens", nvfp4_recipe(), DENSE),
        ("rows", row_scaled_recipe(), DENSE),
    ],
)
def test_all_ranks_round_what_one_process_rounds_bit_for_bit(runtime, ranks, case, recipe, model):
    """All six operands of all Linears, stochastic ones and rows of in_proj that are filled up among them.

    An FP32 sum at the border between two BF16 numbers may fall on either side in another order of summation; what that
    changes, later operands pass on. It happens in few places, if at all.
    """
    one = run(runtime, recipe, model, parallel_layout())
    for found in ranks:
        assert found[case].operands.keys() == one.operands.keys()
        others = [name for name, part in found[case].operands.items() if not is_equal(part, one.operands[name])]
        assert len(others) <= 0.1 * len(one.operands), others
        assert [name for name in others if name[1].endswith(".w")] == []
        assert found[case].steps[0][0] == pytest.approx(one.steps[0][0], rel=1e-6)
        for step, expected in zip(found[case].steps, one.steps, strict=True):
            assert step[0] == pytest.approx(expected[0], rel=2e-3)


@pytest.mark.distributed
@pytest.mark.parametrize(("case", "model"), [("hybrid", HYBRID), ("hybrid_whole_tokens", HYBRID), ("latent", LATENT)])
def test_experts_see_and_return_what_they_do_in_one_process(runtime, ranks, case, model):
    """All operands of their forward; what one number on the other side of a border changes, spreads in backward."""
    one = run(runtime, nvfp4_recipe(), model, parallel_layout())
    for found in ranks:
        parts = found[case].operands
        assert parts.keys() == one.operands.keys()
        unequal = [name for name, part in parts.items() if not is_equal(part, one.operands[name])]
        assert [name for name in unequal if name[1].endswith(".w")] == []
        forward = [name for name in parts if name[1] in {"fprop.x", "wgrad.x"}]
        assert len(set(unequal) & set(forward)) <= 0.1 * len(forward), unequal
        assert found[case].steps[0] == pytest.approx(one.steps[0], rel=1e-2)
        assert found[case].steps[0][0] == pytest.approx(one.steps[0][0], rel=1e-4)


@pytest.mark.distributed
def test_a_tied_embedding_gives_the_loss_of_one_process(runtime, ranks):
    """Its logits are not rounded, and the input gradient is summed over parts in BF16."""
    one = run(runtime, nvfp4_recipe(), TIED, parallel_layout())
    for found in ranks:
        assert found["tied"].steps[0] == pytest.approx(one.steps[0], rel=1e-2)
        assert found["tied"].steps[0][0] == pytest.approx(one.steps[0][0], rel=1e-6)


@pytest.mark.distributed
def test_ranks_hold_different_halves(runtime, ranks):
    rows = [found["dense"].operands["blocks.0.mixer.in_proj", "fprop.w", -1].rows for found in ranks]
    assert [(int(part[0]), len(part)) for part in rows] == [(0, 176), (176, 176)]  # 168 rows and 8 of zeros each
    columns = [found["dense"].operands["blocks.2.mixer.down_proj", "fprop.x", 0].columns for found in ranks]
    assert [(int(part[0]), len(part)) for part in columns] == [(0, 32), (32, 32)]


@pytest.mark.distributed
def test_the_same_layout_twice_is_bitwise_the_same(ranks):
    for found in ranks:
        assert found["again"].steps == found["hybrid"].steps
        assert all(
            torch.equal(found["again"].parameters[name], value) for name, value in found["hybrid"].parameters.items()
        )


@pytest.mark.distributed
@pytest.mark.parametrize("case", ["checkpointed", "products_kept"])
def test_checkpointing_changes_no_bit(ranks, case):
    for found in ranks:
        assert found[case].steps == found["hybrid"].steps


@pytest.mark.distributed
def test_capturing_changes_no_bit(ranks):
    for found in ranks:
        plain, compiled = found["compiled"]
        assert compiled.steps == plain.steps


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("model", [HYBRID, WHOLE_NORM], ids=["every kind", "whole norm"])
def test_capturing_every_kind_of_block_changes_no_bit(model):
    for plain, compiled in run_on_ranks(plain_and_compiled, 2, model, timeout_seconds=300):
        assert compiled.steps == plain.steps


@pytest.mark.distributed
def test_sums_in_bf16_differ_by_their_rounding(ranks):
    for found in ranks:
        exact, rounded = found["hybrid"].steps[0], found["in_bf16"].steps[0]
        assert rounded != exact
        assert rounded == pytest.approx(exact, rel=2e-2)


@pytest.mark.distributed
def test_no_document_sees_another(ranks):
    batch = tiny_batches(step=0)[0]
    for found in ranks:
        before, after = found["logits"]
        assert before.shape == (1, SEQUENCE_LENGTH, 64)
        first = batch.document_ids[0] == 0
        assert torch.equal(before[0, first], after[0, first])
        assert not torch.equal(before[0, ~first], after[0, ~first])


@pytest.mark.distributed
def test_logits_are_whole_and_alike_on_all_ranks(runtime, ranks):
    one = logits_of(runtime, parallel_layout(), HYBRID)
    for found in ranks:
        torch.testing.assert_close(found["logits"][0], one[0], rtol=2e-2, atol=2e-2)
        assert torch.equal(found["logits"][0], ranks[0]["logits"][0])


@pytest.mark.distributed
def test_what_stands_in_padding_changes_no_loss(ranks):
    for found in ranks:
        zeros, fives = found["padding"]
        assert zeros == fives
        assert found["padding"] == ranks[0]["padding"]
