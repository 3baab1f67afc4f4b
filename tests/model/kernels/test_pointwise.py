import pytest
import torch
import torch.nn.functional as F

from nvfp4_train.model.loss import IGNORE_INDEX
from nvfp4_train.model.mlp import squared_relu
from nvfp4_train.numerics.kernels import Backend, use
from tests.support.compiler import needs_compiler

pytestmark = needs_compiler


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5, 7), (70, 128), (0, 4)])
def test_squared_relu(shape, dtype):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    grad_y = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    with use(Backend.compiled):
        y = squared_relu(x)
    precise = x.detach().float().requires_grad_()
    wanted = F.relu(precise).square()
    assert torch.equal(y, wanted.to(dtype))  # one product, rounded once
    (grad_x,) = torch.autograd.grad(y, x, grad_y)
    (wanted_grad,) = torch.autograd.grad(wanted, precise, grad_y.float())
    assert torch.equal(grad_x, wanted_grad.to(dtype))


def test_squared_relu_keeps_nan():
    x = torch.tensor([torch.nan, -torch.inf, -1.0, torch.inf])
    with use(Backend.compiled):
        assert torch.equal(squared_relu(x).isnan(), torch.tensor([True, False, False, False]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "vocabulary"), [(5, 3), (3, 16), (40, 67)])
def test_cross_entropy(tokens, vocabulary, dtype):
    rng = torch.Generator().manual_seed(0)
    wide = torch.randn(tokens, vocabulary + 8, generator=rng).mul(20).to(dtype)
    logits, labels = wide[:, 4:-4], torch.randint(0, vocabulary, (tokens,), generator=rng)
    labels[1] = IGNORE_INDEX
    precise = logits.double().requires_grad_()
    wanted = F.cross_entropy(precise, labels, reduction="none")
    losses, log_sums = torch.ops.nvfp4_train.cross_entropy(logits, labels)
    torch.testing.assert_close(losses.double(), wanted.detach(), rtol=1e-6, atol=1e-5)
    grad = torch.empty_like(logits)
    torch.ops.nvfp4_train.cross_entropy_backward(torch.tensor(0.5), logits, labels, log_sums, grad)
    (expected,) = torch.autograd.grad(wanted.sum() * 0.5, precise)
    tolerance = 1e-6 if dtype is torch.float32 else 2e-3
    torch.testing.assert_close(grad.double(), expected, rtol=4 * tolerance, atol=tolerance)


def test_ops_have_the_shapes_that_compilers_are_told():
    x = torch.randn(4, 6)
    labels = torch.tensor([0, 5, IGNORE_INDEX, 2])
    ops = torch.ops.nvfp4_train
    torch.library.opcheck(ops.squared_relu, (x.T,))
    torch.library.opcheck(ops.squared_relu_backward, (x, x))
    torch.library.opcheck(ops.cross_entropy, (x, labels))
    log_sums = ops.cross_entropy(x, labels)[1]
    torch.library.opcheck(ops.cross_entropy_backward, (torch.ones(()), x, labels, log_sums, torch.empty_like(x)))
