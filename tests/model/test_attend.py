import itertools
from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from nvfp4_train.model.attend import attend
from nvfp4_train.model.documents import locate_documents
from tests.support.models import document_ids

SIZE = 300


def draw(*, rows=2, dtype=torch.float64, requires_grad=False):
    rng = torch.Generator().manual_seed(0)
    return [
        torch.randn(rows, heads, SIZE, 16, generator=rng, dtype=torch.float64).to(dtype).requires_grad_(requires_grad)
        for heads in (4, 2, 2)
    ]


def layout(*lengths):
    """The second row holds the same documents the other way round."""
    ids = document_ids(*lengths, rows=2)
    ids[1] = document_ids(*reversed(lengths))[0]
    return locate_documents(ids)


@pytest.mark.parametrize("lengths", [(SIZE,), (130, 170), (1, 250, 9, 40)])
@pytest.mark.parametrize("window", [0, 1, 7, 128, 200, 1000])
def test_documents_one_by_one_equal_the_mask(lengths, window):
    tensors, documents = draw(requires_grad=True), layout(*lengths)
    masked = replace(documents, one_per_row=False, spans=None)
    found = attend(*tensors, documents=documents, window_tokens=window)
    wanted = attend(*tensors, documents=masked, window_tokens=window)
    torch.testing.assert_close(found, wanted)
    cotangent = torch.randn_like(found)
    for left, right in zip(
        torch.autograd.grad(found, tensors, cotangent), torch.autograd.grad(wanted, tensors, cotangent), strict=True
    ):
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize("window", [0, 7])
def test_the_block_mask_is_the_mask(window):
    tensors, documents = draw(dtype=torch.float32), layout(1, 250, 9, 40)
    mask = documents.block_mask(window_tokens=window)
    assert documents.block_mask(window_tokens=window) is mask
    found = flex_attention(*tensors, block_mask=mask, enable_gqa=True)  # what CUDA runs compiled
    wanted = attend(*tensors, documents=documents, window_tokens=window)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 7])
def test_cuda_equals_the_cpu(window):
    tensors, documents = draw(dtype=torch.float32), layout(1, 250, 9, 40)
    on_device = locate_documents(documents.ids.cuda())
    found = attend(*(tensor.cuda() for tensor in tensors), documents=on_device, window_tokens=window)
    wanted = attend(*tensors, documents=documents, window_tokens=window)
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 20])
def test_another_document_changes_no_bit(dtype, window):
    documents = layout(100, 120, 80)
    tensors = draw(dtype=dtype)
    changed = [tensor.clone() for tensor in tensors]
    for row, tensor in itertools.product(range(2), changed):
        tensor[row, :, documents.ids[row] == 1] *= 3
    before, after = (attend(*parts, documents=documents, window_tokens=window) for parts in (tensors, changed))
    for row in range(2):
        others = documents.ids[row] != 1
        assert torch.equal(before[row][:, others], after[row][:, others])
        assert not torch.equal(before[row][:, ~others], after[row][:, ~others])


def test_many_documents_cost_less_than_one():
    """Counted in scores, which the calls compute: sum of squares of the lengths, not the square of the sum."""
    seen = []
    original = torch.nn.functional.scaled_dot_product_attention

    def counting(query, key, *args, **kwargs):
        seen.append(query.shape[2] * key.shape[2])
        return original(query, key, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", counting)
        attend(*draw(rows=1), documents=locate_documents(document_ids(100, 100, 100)), window_tokens=0)
    assert seen == [100 * 100] * 3
