import pytest
import torch

from nvfp4_train.model.norm import GatedRMSNorm, RMSNorm
from nvfp4_train.numerics.kernels import Backend, use
from tests.support.compiler import needs_compiler

pytestmark = needs_compiler

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 5e-3}  # of the norm of a tensor
# leading dims and channels of the activations, channels that share a mean square
SHAPES = {
    "one piece": ((2, 70, 48), 48),
    "groups inside": ((3, 65, 24), 8),
    "channels in groups": ((2, 33, 2, 20), 20),
    "one mean square over groups": ((2, 5, 3, 7), 21),
}


def run(norm, tensors, *, backend):
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    with use(backend):
        y = norm(*leaves)
        weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
        return [y.detach(), *torch.autograd.grad(y, [*leaves, norm.weight], weight)]


def draw(shape, group_width, dtype, *, gated):
    rng = torch.Generator().manual_seed(0)
    width = shape[-1] if len(shape) == 3 else shape[-2] * shape[-1]
    norm = GatedRMSNorm(width, group_width=group_width, eps=1e-3) if gated else RMSNorm(width, eps=1e-3)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(width, generator=rng))
    return norm, [torch.randn(shape, generator=rng).to(dtype) for _ in range(2 if gated else 1)]


def check(norm, tensors):
    mine = run(norm, tensors, backend=Backend.compiled)
    exact = run(norm.double(), [tensor.double() for tensor in tensors], backend=Backend.oracle)
    for found, wanted in zip(mine, exact, strict=True):
        assert (found.double() - wanted).norm() <= TOLERANCE[tensors[0].dtype] * wanted.norm()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("shape", "group_width"), SHAPES.values(), ids=SHAPES.keys())
def test_the_gated_norm_equals_its_definition(shape, group_width, dtype):
    check(*draw(shape, group_width, dtype, gated=True))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [48, 21])
def test_the_norm_equals_its_definition(width, dtype):
    check(*draw((2, 70, width), width, dtype, gated=False))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_views_of_a_wider_tensor(dtype):
    norm, (x, gate) = draw((2, 33, 2, 20), 20, dtype, gated=True)
    wide = torch.cat((gate, x, gate), dim=-1)
    parts = wide.split((20, 20, 20), dim=-1)
    assert torch.equal(norm(parts[1], parts[2]), norm(x, gate))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_number_of_threads_changes_no_bit(dtype):
    norm, tensors = draw((2, 170, 48), 24, dtype, gated=True)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(run(norm, tensors, backend=Backend.compiled))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(first, second) for first, second in zip(results[0], other, strict=True))


def test_ops_have_the_shapes_that_compilers_are_told():
    norm, (x, gate) = draw((2, 33, 2, 20), 20, torch.float32, gated=True)
    ops, weight = torch.ops.nvfp4_train, norm.weight.detach()
    for values in (gate, None):
        torch.library.opcheck(ops.norm_forward, (x, values, weight), {"group_width": 20, "eps": 1e-3})
        y, inverse = ops.norm_forward(x, values, weight, group_width=20, eps=1e-3)
        torch.library.opcheck(ops.norm_backward, (y, x, values, weight, inverse), {"group_width": 20})
