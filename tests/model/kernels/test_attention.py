"""The attention kernel against masked attention in float64."""

from dataclasses import replace

import pytest
import torch

from nvfp4_train.model.attend import attend
from nvfp4_train.model.documents import locate_documents
from nvfp4_train.model.kernels.program import is_fused
from nvfp4_train.numerics.kernels import Backend, use
from tests.support.compiler import needs_compiler
from tests.support.models import document_ids

pytestmark = needs_compiler

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1.2e-2}  # of the norm of a tensor
# lengths of documents; query heads, key-value heads, channels
CASES = {
    "one document": ((150,), (4, 2, 16)),
    "documents": ((1, 70, 63, 2, 64, 5), (4, 1, 16)),
    "as many keys as queries, odd widths": ((33, 98), (3, 3, 7)),
    "one token": ((1,), (2, 1, 8)),
    "wide heads": ((65,), (2, 2, 80)),
}


def draw(case, dtype):
    lengths, (heads, kv_heads, width) = CASES[case]
    rng = torch.Generator().manual_seed(0)
    # as a projection lays them out
    tensors = [
        torch.randn(2, sum(lengths), count, width, generator=rng).to(dtype).transpose(1, 2)
        for count in (heads, kv_heads, kv_heads)
    ]
    return tensors, locate_documents(document_ids(*lengths, rows=2))


def run(tensors, documents, *, window, backend):
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    with use(backend):
        out = attend(*leaves, documents=documents, window_tokens=window)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
        return [out.detach(), *torch.autograd.grad(out, leaves, weight)]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [0, 1, 20, 100])
@pytest.mark.parametrize("case", CASES)
def test_equals_masked_attention_in_float64(case, window, dtype):
    tensors, documents = draw(case, dtype)
    assert is_fused(tensors[0])
    masked = replace(documents, one_per_row=False, spans=None)
    mine = run(tensors, documents, window=window, backend=Backend.compiled)
    exact = run([tensor.double() for tensor in tensors], masked, window=window, backend=Backend.oracle)
    for found, wanted in zip(mine, exact, strict=True):
        # A query that sees itself only has no gradient: what is left is rounding of terms as large as the result.
        assert (found.double() - wanted).norm() <= TOLERANCE[dtype] * max(wanted.norm(), exact[0].norm())


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_another_document_changes_no_bit_of_outputs_and_gradients(dtype):
    tensors, documents = draw("documents", dtype)
    inside = (documents.ids == 2)[:, None, :, None]
    changed = [torch.where(inside, -3 * tensor, tensor) for tensor in tensors]
    before, after = (run(values, documents, window=0, backend=Backend.compiled) for values in (tensors, changed))
    others = documents.ids[0] != 2
    for first, second in zip(before, after, strict=True):
        assert torch.equal(first[:, :, others], second[:, :, others])
        assert not torch.equal(first[:, :, ~others], second[:, :, ~others])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_number_of_threads_changes_no_bit(dtype):
    tensors, documents = draw("documents", dtype)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(run(tensors, documents, window=30, backend=Backend.compiled))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(first, second) for first, second in zip(results[0], other, strict=True))


def test_ops_have_the_shapes_that_compilers_are_told():
    tensors, documents = draw("documents", torch.float32)
    arguments = (*tensors, documents.first_seen())
    torch.library.opcheck(torch.ops.nvfp4_train.attention_forward, arguments)
    out, log_sums = torch.ops.nvfp4_train.attention_forward(*arguments)
    torch.library.opcheck(torch.ops.nvfp4_train.attention_backward, (out, [*arguments, out, log_sums]))
