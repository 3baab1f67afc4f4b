import pytest
import torch

from nvfp4_train.model.conv import CausalConv1d
from nvfp4_train.model.documents import locate_documents
from nvfp4_train.numerics.kernels import Backend, use
from tests.support.compiler import needs_compiler
from tests.support.models import document_ids

pytestmark = needs_compiler

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 5e-3}  # of the norm of a tensor
# Longer than the kernel's blocks of 128 tokens and 256 channels.
CASES = {
    "one document": ((133,), 2, 20, 4),
    "documents": ((2, 1, 126, 3, 40, 100), 1, 300, 4),
    "two taps": ((5, 130), 2, 7, 2),
    "one tap": ((9,), 1, 5, 1),
    "shorter than the taps": ((2,), 1, 16, 4),
}


def draw(case, dtype, *, bias=True):
    lengths, groups, width, d_conv = CASES[case]
    rng = torch.Generator().manual_seed(0)
    conv = CausalConv1d(groups * width, d_conv=d_conv, bias=bias)
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=rng))
    x = torch.randn(2, sum(lengths), groups, width, generator=rng).to(dtype)
    return conv, x, document_ids(*lengths, rows=2)


def run(conv, x, ids, *, backend):
    x = x.detach().clone().requires_grad_()
    with use(backend):
        y = conv(x, locate_documents(ids))
        weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
        return [y.detach(), *torch.autograd.grad(y, [x, *conv.parameters()], weight)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", CASES)
def test_equals_its_definition(case, dtype, bias):
    conv, x, ids = draw(case, dtype, bias=bias)
    mine = run(conv, x, ids, backend=Backend.compiled)
    exact = run(conv.double(), x.double(), ids, backend=Backend.oracle)
    for found, wanted in zip(mine, exact, strict=True):
        assert (found.double() - wanted).norm() <= TOLERANCE[dtype] * wanted.norm()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_another_document_changes_no_bit_of_outputs_and_gradients(dtype):
    conv, x, ids = draw("documents", dtype)
    changed = torch.where((ids == 2)[..., None, None], -3 * x, x)
    before, after = (run(conv, values, ids, backend=Backend.compiled)[:2] for values in (x, changed))
    others = ids[0] != 2
    for first, second in zip(before, after, strict=True):
        assert torch.equal(first[:, others], second[:, others])
        assert not torch.equal(first[:, ~others], second[:, ~others])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_number_of_threads_changes_no_bit(dtype):
    conv, x, ids = draw("documents", dtype)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(run(conv, x, ids, backend=Backend.compiled))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(first, second) for first, second in zip(results[0], other, strict=True))


def test_ops_have_the_shapes_that_compilers_are_told():
    conv, x, ids = draw("documents", torch.float32)
    wide = torch.cat((x, x), dim=-1)[..., : x.shape[-1]]
    for bias, documents in ((conv.bias.detach(), ids), (None, None)):
        arguments = (wide, conv.weight.detach(), bias, documents)
        torch.library.opcheck(torch.ops.nvfp4_train.conv_forward, arguments)
        torch.library.opcheck(torch.ops.nvfp4_train.conv_backward, (x, *arguments))
