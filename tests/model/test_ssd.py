"""The chunked scan against the recurrence it stands for."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from nvfp4_train.model.ssd import ssd_scan
from tests.support.models import document_ids


class Inputs(NamedTuple):
    x: Tensor
    log_decay: Tensor
    b: Tensor
    c: Tensor


def draw_inputs(*, rows=2, size=37, groups=2, heads=3, d_head=4, d_state=5, dtype=torch.float64, seed=0) -> Inputs:
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(rows, size, groups, *shape, generator=rng, dtype=torch.float64).to(dtype)

    scalar = torch.promote_types(dtype, torch.float32)
    dt = normal(heads).to(scalar).exp()
    return Inputs(
        x=normal(heads, d_head) * dt[..., None].to(dtype), log_decay=-dt * 0.3, b=normal(d_state), c=normal(d_state)
    )


def recurrence(inputs: Inputs, *, ids: Tensor) -> Tensor:
    rows, size, groups, heads, d_head = inputs.x.shape
    y = torch.empty_like(inputs.x)
    for row in range(rows):
        for group in range(groups):
            for head in range(heads):
                state = inputs.x.new_zeros(d_head, inputs.b.shape[-1])
                for t in range(size):
                    if t and ids[row, t] != ids[row, t - 1]:
                        state = torch.zeros_like(state)
                    decay = inputs.log_decay[row, t, group, head].exp()
                    state = decay * state + torch.outer(inputs.x[row, t, group, head], inputs.b[row, t, group])
                    y[row, t, group, head] = state @ inputs.c[row, t, group]
    return y


def scan(inputs: Inputs, *, ids: Tensor, chunk_size: int) -> Tensor:
    return ssd_scan(**inputs._asdict(), document_ids=ids, chunk_size=chunk_size)


LAYOUTS = {
    "one document": (37,),
    "boundaries inside chunks": (5, 3, 1, 1, 20, 7),
    "boundaries between chunks": (8, 16, 8, 5),
    "documents of one token": (1,) * 37,
}


@pytest.mark.parametrize("chunk_size", [1, 2, 8, 16, 37, 64])
@pytest.mark.parametrize("lengths", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_equals_recurrence(lengths, chunk_size):
    inputs, ids = draw_inputs(), document_ids(*lengths, rows=2)
    torch.testing.assert_close(
        scan(inputs, ids=ids, chunk_size=chunk_size), recurrence(inputs, ids=ids), rtol=1e-10, atol=1e-10
    )


def test_rows_may_have_different_documents():
    inputs = draw_inputs(size=16)
    ids = torch.cat((document_ids(16), document_ids(3, 13)))
    torch.testing.assert_close(scan(inputs, ids=ids, chunk_size=8), recurrence(inputs, ids=ids), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("groups", [1, 4])
def test_groups(groups):
    inputs, ids = draw_inputs(groups=groups, heads=2, size=20), document_ids(20, rows=2)
    torch.testing.assert_close(scan(inputs, ids=ids, chunk_size=8), recurrence(inputs, ids=ids), rtol=1e-10, atol=1e-10)


def test_reversed_decays_do_not_overflow():
    # exp of the sum from a later to an earlier token would be exp(+37 * 50)
    inputs, ids = draw_inputs(), document_ids(20, 17, rows=2)
    inputs = inputs._replace(log_decay=torch.full_like(inputs.log_decay, -50.0).requires_grad_())
    y = scan(inputs, ids=ids, chunk_size=16)
    y.sum().backward()
    torch.testing.assert_close(y, recurrence(inputs, ids=ids), rtol=1e-10, atol=1e-10)
    assert inputs.log_decay.grad.isfinite().all()


def test_gradients_match_finite_differences():
    inputs = draw_inputs(rows=1, size=7, groups=2, heads=1, d_head=2, d_state=2)
    ids = document_ids(4, 3)
    leaves = [t.requires_grad_() for t in inputs]
    assert torch.autograd.gradcheck(lambda *t: scan(Inputs(*t), ids=ids, chunk_size=3), leaves)


@pytest.mark.parametrize("chunk_size", [4, 16])
def test_gradients_match_the_recurrence(chunk_size):
    ids = document_ids(5, 14, 2, rows=2)
    ours, theirs = draw_inputs(size=21), draw_inputs(size=21)
    for tensor in (*ours, *theirs):
        tensor.requires_grad_()
    weight = torch.randn(ours.x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (scan(ours, ids=ids, chunk_size=chunk_size) * weight).sum().backward()
    steps = torch.zeros((), dtype=torch.float64)
    for row in range(2):  # an out-of-place recurrence that autograd can follow
        state = torch.zeros(2, 3, 4, 5, dtype=torch.float64)
        for t in range(21):
            if t and ids[row, t] != ids[row, t - 1]:
                state = torch.zeros_like(state)
            entering = torch.einsum("grp,gn->grpn", theirs.x[row, t], theirs.b[row, t])
            state = theirs.log_decay[row, t].exp()[..., None, None] * state + entering
            steps = steps + (torch.einsum("grpn,gn->grp", state, theirs.c[row, t]) * weight[row, t]).sum()
    steps.backward()
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, reference.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [(19, 18), (16, 21), (1, 35, 1)])
def test_another_document_changes_no_bit(dtype, lengths):
    ids = document_ids(*lengths, rows=1)
    inputs = draw_inputs(rows=1, dtype=dtype)
    middle = ids[0] == 1
    changed = draw_inputs(rows=1, dtype=dtype, seed=1)
    mixed = Inputs(
        *(torch.where(middle.view(1, -1, *(1,) * (t.ndim - 2)), new, t) for t, new in zip(inputs, changed, strict=True))
    )
    before, after = scan(inputs, ids=ids, chunk_size=16), scan(mixed, ids=ids, chunk_size=16)
    assert torch.equal(before[:, ~middle], after[:, ~middle])
    assert not torch.equal(before[:, middle], after[:, middle])


def test_bf16_is_close_to_exact():
    inputs, ids = draw_inputs(size=64, d_state=16), document_ids(30, 34, rows=2)
    low = Inputs(*(t.to(torch.bfloat16) if name in "xbc" else t.float() for name, t in inputs._asdict().items()))
    error = scan(low, ids=ids, chunk_size=16).double() - recurrence(inputs, ids=ids)
    assert error.norm() / recurrence(inputs, ids=ids).norm() < 0.01
