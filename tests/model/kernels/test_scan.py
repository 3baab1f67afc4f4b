"""The fused scan against the scan that it stands for."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nvfp4_train.model.documents import locate_documents
from nvfp4_train.model.kernels.program import is_fused
from nvfp4_train.model.mamba2 import Scan
from nvfp4_train.numerics.kernels import Backend, use
from tests.support.compiler import needs_compiler
from tests.support.models import TINY_MAMBA, document_ids

pytestmark = needs_compiler

# heads by group and their width, states, chunk, documents; limits of the time step; initial state
CASES = {
    "odd widths": ((2, 3, 4, 5, 8), (37,), (0.0, torch.inf), False),
    "documents, limits": ((2, 3, 4, 5, 8), (5, 3, 1, 1, 20, 7), (0.3, 2.0), True),
    "whole vectors": ((1, 2, 16, 32, 16), (33, 67), (0.0, torch.inf), True),
    "the last chunk is short": ((2, 2, 32, 64, 32), (70,), (0.0, torch.inf), True),
    "one chunk, longer than the sequence": ((1, 2, 17, 19, 100), (20, 41), (0.0, torch.inf), False),
    "chunks that end with documents": ((1, 1, 8, 8, 16), (16, 32, 16), (0.0, torch.inf), False),
    "one token": ((1, 2, 8, 8, 16), (1,), (0.0, torch.inf), True),
    "chunks of one token": ((1, 2, 8, 8, 1), (3, 4), (0.0, torch.inf), True),
}
# Of the norm of a tensor. FP32: sums of up to 100 terms, some of which cancel. BF16: half a digit is 2^-9.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2}


def draw(case: str, dtype: torch.dtype, *, rows=2) -> tuple[Scan, list[Tensor], Tensor]:
    (groups, heads, width, states, chunk), lengths, (dt_min, dt_max), has_initial = CASES[case]
    cfg = replace(
        TINY_MAMBA, num_heads=groups * heads, d_head=width, d_state=states, num_groups=groups, chunk_size=chunk,
        dt_min=dt_min, dt_max=dt_max,
    )  # fmt: skip
    rng = torch.Generator().manual_seed(0)
    scan, size = Scan(cfg), sum(lengths)
    with torch.no_grad():
        for parameter in scan.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=rng) * 0.5)
    shapes = [(heads, width), (states,), (states,), (heads,)]
    tensors = [torch.randn(rows, size, groups, *shape, generator=rng).to(dtype) for shape in shapes]
    if has_initial:
        tensors.append(torch.randn(rows, groups, heads, states, width, generator=rng))
    return scan, tensors, document_ids(*lengths, rows=rows)


def run(scan: Scan, tensors: list[Tensor], ids: Tensor, *, backend: Backend) -> list[Tensor]:
    """Output, then gradients of all inputs and parameters."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    x, b, c, dt, *initial = leaves
    with use(backend):
        y = scan(x, b=b, c=c, dt=dt, documents=locate_documents(ids), initial_state=initial[0] if initial else None)
        weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
        return [y.detach(), *torch.autograd.grad(y, [*leaves, *scan.parameters()], weight)]


def exact(scan: Scan, tensors: list[Tensor], ids: Tensor) -> list[Tensor]:
    precise = Scan(scan.cfg).double()
    precise.load_state_dict(scan.state_dict())
    return run(precise, [tensor.double() for tensor in tensors], ids, backend=Backend.oracle)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_scan_in_float64(case, dtype):
    scan, tensors, ids = draw(case, dtype)
    assert is_fused(tensors[0])
    for mine, reference in zip(
        run(scan, tensors, ids, backend=Backend.compiled), exact(scan, tensors, ids), strict=True
    ):
        assert (mine.double() - reference).norm() <= TOLERANCE[dtype] * reference.norm() + 1e-6


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_views_of_a_wider_tensor(dtype):
    scan, tensors, ids = draw("documents, limits", dtype)
    x, b, c, dt, initial = tensors
    mixed = torch.cat((x.flatten(3), b, c, dt), dim=-1)
    parts = mixed.split((x[0, 0, 0].numel(), b.shape[-1], c.shape[-1], dt.shape[-1]), dim=-1)
    views = [parts[0].unflatten(-1, x.shape[-2:]), *parts[1:]]
    documents = locate_documents(ids)
    wanted = scan(x, b=b, c=c, dt=dt, documents=documents, initial_state=initial)
    got = scan(views[0], b=views[1], c=views[2], dt=views[3], documents=documents, initial_state=initial)
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_another_document_changes_no_bit_of_outputs_and_gradients(dtype):
    scan, tensors, _ = draw("whole vectors", dtype)
    tensors = tensors[:4]
    ids = document_ids(33, 20, 47, rows=2)
    changed = [tensor.clone() for tensor in tensors]
    for tensor in changed:
        tensor[:, 33:53] *= -3
    before, after = (run(scan, values, ids, backend=Backend.compiled)[:5] for values in (tensors, changed))
    others = ids[0] != 1
    for first, second in zip(before, after, strict=True):
        assert torch.equal(first[:, others], second[:, others])
        assert not torch.equal(first[:, ~others], second[:, ~others])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_number_of_threads_changes_no_bit(dtype):
    scan, tensors, ids = draw("the last chunk is short", dtype)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(run(scan, tensors, ids, backend=Backend.compiled))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(first, second) for first, second in zip(results[0], other, strict=True))


def test_ops_have_the_shapes_that_compilers_are_told():
    scan, tensors, ids = draw("documents, limits", torch.float32)
    *activations, initial = tensors
    arguments = ([*activations, scan.dt_bias, scan.A_log, scan.D], ids, initial, [8.0, 0.0, 2.0])
    arguments = ([tensor.detach() for tensor in arguments[0]], *arguments[1:])
    torch.library.opcheck(torch.ops.nvfp4_train.scan_forward, arguments)
    y, *kept = torch.ops.nvfp4_train.scan_forward(*arguments)
    torch.library.opcheck(torch.ops.nvfp4_train.scan_backward, (y, arguments[0], [ids, *kept], initial, arguments[3]))
