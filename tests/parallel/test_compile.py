import pytest
import torch
from torch import Tensor

from nvfp4_train.config.parallel import ActivationCheckpoint
from nvfp4_train.config.recipe import ComputeDtype
from nvfp4_train.model.hybrid import HybridLM
from nvfp4_train.parallel.activation import checkpoint_activations
from nvfp4_train.parallel.compile import compile_blocks
from nvfp4_train.precision.apply import apply_precision
from tests.support.models import document_ids, initialized
from tests.support.recipes import cast_recipe
from tests.support.tiny import tiny_model

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
