import pytest
import torch
import torch.nn.functional as F

from nvfp4_train.model.conv import CausalConv1d
from nvfp4_train.model.documents import locate_documents
from tests.support.models import document_ids


def make_conv(*, bias=True, dtype=torch.float64) -> CausalConv1d:
    conv = CausalConv1d(6, d_conv=4, bias=bias).to(dtype)
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=rng))
    return conv


def reference(conv: CausalConv1d, x: torch.Tensor) -> torch.Tensor:
    padded = F.pad(x.transpose(1, 2), (3, 0))
    return F.silu(F.conv1d(padded, conv.weight[:, None], conv.bias, groups=6).transpose(1, 2))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("lengths", [(9,), (4, 5), (1, 1, 2, 5), (2,)])
def test_equals_a_convolution_of_each_document(lengths, bias):
    conv = make_conv(bias=bias)
    x = torch.randn(2, sum(lengths), 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn_like(x)
    got = conv(x, locate_documents(document_ids(*lengths, rows=2)))
    wanted = torch.cat([reference(conv, part) for part in x.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    leaves = [x, *conv.parameters()]
    for mine, theirs in zip(
        torch.autograd.grad((got * weight).sum(), leaves),
        torch.autograd.grad((wanted * weight).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_gradients_match_finite_differences():
    conv, documents = make_conv(), locate_documents(document_ids(3, 2))
    x = torch.randn(1, 5, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: conv(x, documents), (x, *conv.parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_document_changes_no_bit(dtype):
    conv, documents = make_conv(dtype=torch.float32), locate_documents(document_ids(4, 5))
    x = torch.randn(1, 9, 6).to(dtype)
    changed = x.clone()
    changed[:, :4] = 7
    before, after = conv(x, documents), conv(changed, documents)
    assert before.dtype == dtype
    assert torch.equal(before[:, 4:], after[:, 4:])
    assert not torch.equal(before[:, :4], after[:, :4])


@pytest.mark.parametrize(("lengths", "at"), [((9,), 5), ((5, 4), 5), ((2, 3, 4), 3), ((4, 1, 4), 6), ((9,), 7)])
def test_a_sequence_can_be_cut(lengths, at):
    conv, ids = make_conv(), document_ids(*lengths, rows=2)
    x = torch.randn(2, 9, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn_like(x)
    before = F.pad(x[:, :at], (0, 0, 3, 0))[:, -3:]
    same = F.pad(ids[:, :at] + 1, (3, 0))[:, -3:] == ids[:, at : at + 1] + 1
    parts = (
        conv(x[:, :at], locate_documents(ids[:, :at])),
        conv(x[:, at:], locate_documents(ids[:, at:]), preceding=before * same[..., None]),
    )
    got, wanted = torch.cat(parts, dim=1), conv(x, locate_documents(ids))
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    leaves = [x, *conv.parameters()]
    for mine, theirs in zip(
        torch.autograd.grad((got * weight).sum(), leaves),
        torch.autograd.grad((wanted * weight).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)
