"""The chunked scan against the recurrence it stands for."""

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from nvfp4_train.model.ssd import ScanInputs, ssd_scan
from tests.support.models import document_ids


def tensors_of(inputs: ScanInputs) -> tuple[Tensor, ...]:
    return tuple(getattr(inputs, field.name) for field in fields(inputs))


def inputs_of(*tensors: Tensor) -> ScanInputs:
    return ScanInputs(**{field.name: tensor for field, tensor in zip(fields(ScanInputs), tensors, strict=True)})


def draw_inputs(*, rows=2, size=37, groups=2, heads=3, d_head=4, d_state=5, dtype=torch.float64, seed=0) -> ScanInputs:
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(rows, size, groups, *shape, generator=rng, dtype=torch.float64).to(dtype)

    scalar = torch.promote_types(dtype, torch.float32)
    dt = normal(heads).to(scalar).exp()
    return ScanInputs(
        x=normal(heads, d_head) * dt[..., None].to(dtype), log_decay=-dt * 0.3, b=normal(d_state), c=normal(d_state)
    )


def recurrence(inputs: ScanInputs, *, ids: Tensor) -> Tensor:
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


def scan(inputs: ScanInputs, *, ids: Tensor, chunk_size: int) -> Tensor:
    return ssd_scan(inputs, document_ids=ids, chunk_size=chunk_size)[0]


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
    inputs = replace(inputs, log_decay=torch.full_like(inputs.log_decay, -50.0).requires_grad_())
    y = scan(inputs, ids=ids, chunk_size=16)
    y.sum().backward()
    torch.testing.assert_close(y, recurrence(inputs, ids=ids), rtol=1e-10, atol=1e-10)
    assert inputs.log_decay.grad.isfinite().all()


def test_gradients_match_finite_differences():
    inputs = draw_inputs(rows=1, size=7, groups=2, heads=1, d_head=2, d_state=2)
    ids = document_ids(4, 3)
    leaves = [t.requires_grad_() for t in tensors_of(inputs)]
    assert torch.autograd.gradcheck(lambda *t: scan(inputs_of(*t), ids=ids, chunk_size=3), leaves)


@pytest.mark.parametrize("chunk_size", [4, 16])
def test_gradients_match_the_recurrence(chunk_size):
    ids = document_ids(5, 14, 2, rows=2)
    ours, theirs = draw_inputs(size=21), draw_inputs(size=21)
    for tensor in (*tensors_of(ours), *tensors_of(theirs)):
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
    for mine, reference in zip(tensors_of(ours), tensors_of(theirs), strict=True):
        torch.testing.assert_close(mine.grad, reference.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [(19, 18), (16, 21), (1, 35, 1)])
def test_another_document_changes_no_bit(dtype, lengths):
    ids = document_ids(*lengths, rows=1)
    inputs = draw_inputs(rows=1, dtype=dtype)
    middle = ids[0] == 1
    changed = draw_inputs(rows=1, dtype=dtype, seed=1)
    pairs = zip(tensors_of(inputs), tensors_of(changed), strict=True)
    mixed = inputs_of(*(torch.where(middle.view(1, -1, *(1,) * (t.ndim - 2)), new, t) for t, new in pairs))
    before, after = scan(inputs, ids=ids, chunk_size=16), scan(mixed, ids=ids, chunk_size=16)
    assert torch.equal(before[:, ~middle], after[:, ~middle])
    assert not torch.equal(before[:, middle], after[:, middle])


@pytest.mark.parametrize("chunk_size", [16, 256])
def test_decays_of_neighbours_are_exact_late_in_a_long_chunk(chunk_size):
    """Sums of log-decays that are large and differ by little: rounded to FP32 they would be wrong by 1e-5."""
    exact = draw_inputs(rows=1, size=250)
    ids = document_ids(250)
    wanted = recurrence(exact, ids=ids)
    found = scan(inputs_of(*(tensor.float() for tensor in tensors_of(exact))), ids=ids, chunk_size=chunk_size)
    assert exact.log_decay.sum(dim=1).min() < -100
    assert ((found.double() - wanted).abs().max() / wanted.abs().max()).item() < 1e-6


def test_bf16_is_close_to_exact():
    inputs, ids = draw_inputs(size=64, d_state=16), document_ids(30, 34, rows=2)
    low = inputs_of(*(t.to(torch.bfloat16) for t in tensors_of(inputs)))
    low = replace(low, log_decay=inputs.log_decay.float())
    error = scan(low, ids=ids, chunk_size=16).double() - recurrence(inputs, ids=ids)
    assert error.norm() / recurrence(inputs, ids=ids).norm() < 0.01


CUTS = {
    "inside a document": ((37,), 20),
    "at a border": ((20, 17), 20),
    "near borders": ((3, 19, 1, 14), 21),
    "one token": ((37,), 1),
}


def cut(inputs: ScanInputs, ids: Tensor, at: int) -> list[tuple[ScanInputs, Tensor]]:
    parts = zip(*(t.split((at, t.shape[1] - at), dim=1) for t in (*tensors_of(inputs), ids)), strict=True)
    return [(inputs_of(*tensors), ids) for *tensors, ids in parts]


def scan_in_two(inputs: ScanInputs, *, ids: Tensor, at: int) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, final state and total decay of the whole, from those of two parts."""
    (first, first_ids), (second, second_ids) = cut(inputs, ids, at)
    left, after_left = ssd_scan(first, document_ids=first_ids, chunk_size=8)
    goes_on = (first_ids[:, -1] == second_ids[:, 0]).double()[:, None, None]
    initial = after_left.state * goes_on[..., None, None]
    right, after_right = ssd_scan(second, document_ids=second_ids, chunk_size=8, initial_state=initial)
    decay = after_left.total_decay * goes_on * after_right.total_decay
    return torch.cat((left, right), dim=1), after_right.state, decay


@pytest.mark.parametrize(("lengths", "at"), CUTS.values(), ids=CUTS.keys())
def test_a_scan_can_be_cut(lengths, at):
    ids = document_ids(*lengths, rows=2)
    rng = torch.Generator().manual_seed(2)
    whole, parts = draw_inputs(), draw_inputs()
    for tensor in (*tensors_of(whole), *tensors_of(parts)):
        tensor.requires_grad_()
    y, final = ssd_scan(whole, document_ids=ids, chunk_size=16)
    wanted = (y, final.state, final.total_decay)
    got = scan_in_two(parts, ids=ids, at=at)
    weights = [torch.randn(t.shape, generator=rng, dtype=t.dtype) for t in wanted]
    sum((t * weight).sum() for t, weight in zip(wanted, weights, strict=True)).backward()
    sum((t * weight).sum() for t, weight in zip(got, weights, strict=True)).backward()
    for mine, reference in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-10, atol=1e-10)
    for mine, reference in zip(tensors_of(parts), tensors_of(whole), strict=True):
        torch.testing.assert_close(mine.grad, reference.grad, rtol=1e-9, atol=1e-9)


def test_gradients_of_the_initial_state_match_finite_differences():
    inputs = draw_inputs(rows=1, size=7, groups=1, heads=2, d_head=2, d_state=2)
    initial = torch.randn(1, 1, 2, 2, 2, dtype=torch.float64, requires_grad=True)
    leaves = [t.requires_grad_() for t in tensors_of(inputs)]

    def run(initial, *tensors):
        y, final = ssd_scan(inputs_of(*tensors), document_ids=document_ids(7), chunk_size=3, initial_state=initial)
        return y, final.state, final.total_decay

    assert torch.autograd.gradcheck(run, (initial, *leaves))
