from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_train.config.model import ModelConfig, NormGroup
from nvfp4_train.config.parallel import ActivationCheckpoint, Compile
from nvfp4_train.config.recipe import ComputeDtype
from nvfp4_train.model.hybrid import HybridLM
from nvfp4_train.parallel.activation import checkpoint_activations
from nvfp4_train.parallel.compile import compile_blocks
from nvfp4_train.parallel.runtime import Runtime
from nvfp4_train.precision.apply import apply_precision
from tests.support.engines import build_tiny_engine, train
from tests.support.models import document_ids, initialized
from tests.support.ranks import run_on_ranks
from tests.support.recipes import cast_recipe
from tests.support.tiny import parallel_layout, tiny_model

TOKENS = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def build(*, pattern: str) -> HybridLM:
    model = initialized(tiny_model(pattern))
    apply_precision(model, cast_recipe(ComputeDtype.fp32), seed=0)
    return model


def run(model: HybridLM, *lengths: int) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    loss = model(TOKENS, document_ids=document_ids(*lengths, rows=2), labels=TOKENS)
    loss.backward()
    return loss.detach(), [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("mode", [ActivationCheckpoint.none, ActivationCheckpoint.block])
def test_captured_blocks_compute_the_same(mode):
    """Without code generation: what the compiler captured, forward bit for bit, sums of gradients up to their order."""
    plain, captured = build(pattern="M-*"), build(pattern="M-*")
    compile_blocks(captured, backend="aot_eager")
    checkpoint_activations(captured, mode)
    for lengths in ((32,), (13, 19), (5, 20, 7)):
        (loss, gradients), (again, others) = run(plain, *lengths), run(captured, *lengths)
        assert torch.equal(loss, again)
        for left, right in zip(gradients, others, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


def test_new_document_layouts_compile_nothing_new():
    model = build(pattern="M-*")
    compile_blocks(model, backend="aot_eager")
    run(model, 13, 19)
    stats = torch._dynamo.utils.counters["stats"]
    before = stats["unique_graphs"]
    for lengths in ((14, 18), (5, 20, 7), (8, 8, 8, 8)):
        run(model, *lengths)
    assert stats["unique_graphs"] == before > 0


@pytest.mark.slow
def test_generated_code_computes_the_same():
    plain, compiled = build(pattern="M-*E"), build(pattern="M-*E")
    compile_blocks(compiled)
    for lengths in ((13, 19), (32,)):
        (loss, gradients), (again, others) = run(plain, *lengths), run(compiled, *lengths)
        torch.testing.assert_close(loss, again, rtol=1e-5, atol=1e-4)
        for left, right in zip(gradients, others, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-4)


def compiled_and_not(runtime: Runtime) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Losses and gradient norms of two steps, of a pipeline and of blocks that two ranks share."""
    shared = tiny_model("M*")
    shared = replace(shared, mamba=replace(shared.mamba, norm_group=NormGroup.whole))  # with an exchange in the block
    layouts: dict[str, tuple[ModelConfig, dict[str, Any]]] = {
        "pp2": (tiny_model("M-"), {"pp": 2}),
        "pp2, apart": (tiny_model("-*"), {"pp": 2, "schedule": "zero_bubble"}),
        "tp2": (shared, {"tp": 2}),
    }
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for name, (model, layout) in layouts.items():
        found[name] = {}
        for mode in Compile:
            torch._dynamo.reset()
            parallel = parallel_layout(compile=mode, **layout)
            engine = build_tiny_engine(runtime, cast_recipe(ComputeDtype.fp32), model=model, parallel=parallel)
            found[name][mode.value] = train(engine, range(2))
    return found


@pytest.mark.slow
@pytest.mark.distributed
def test_generated_code_computes_the_same_in_stages_and_in_shared_blocks():
    for rank in run_on_ranks(compiled_and_not, 2, timeout_seconds=1800):
        for name, losses in rank.items():
            for found, expected in zip(losses["block"], losses["none"], strict=True):
                assert found == pytest.approx(expected, rel=1e-5), name
