from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from nvfp4_train.model.documents import locate_documents
from nvfp4_train.model.hybrid import HybridLM
from nvfp4_train.model.loss import IGNORE_INDEX
from nvfp4_train.model.mtp import later_labels, shift_left
from tests.support.models import TINY_MTP, document_ids, initialized, tiny_model


def draw(*, rows=1, size=20, seed=0) -> torch.Tensor:
    return torch.randint(0, 64, (rows, size), generator=torch.Generator().manual_seed(seed))


def double(**changes) -> HybridLM:
    model = initialized(tiny_model(**changes)).double()
    model.compute_dtype = torch.float64
    return model


def next_labels(tokens, ids):
    return shift_left(tokens, locate_documents(ids), by=1, fill=IGNORE_INDEX)


def test_shifts_stay_in_their_document():
    documents = locate_documents(document_ids(3, 2))
    values = torch.tensor([[1, 2, 3, 4, 5]])
    assert shift_left(values, documents, by=1, fill=-1).tolist() == [[2, 3, -1, 5, -1]]
    assert shift_left(values, documents, by=2, fill=-1).tolist() == [[3, -1, -1, -1, -1]]
    assert shift_left(values, documents, by=9, fill=-1).tolist() == [[-1] * 5]
    assert shift_left(values[..., None].double(), documents, by=1, fill=0.0)[0, :, 0].tolist() == [2, 3, 0, 5, 0]


def test_labels_of_a_depth():
    ids = document_ids(4, 3)
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6, 7]])
    labels = next_labels(tokens, ids)
    assert labels.tolist() == [[2, 3, 4, IGNORE_INDEX, 6, 7, IGNORE_INDEX]]
    assert later_labels(labels, locate_documents(ids), depth=1).tolist() == [
        [3, 4, IGNORE_INDEX, IGNORE_INDEX, 7, IGNORE_INDEX, IGNORE_INDEX]
    ]


def by_hand(model, tokens, ids):
    """The losses of two depths, written out with the modules."""
    documents = locate_documents(ids)
    embedded = model.embedding(tokens)
    h = embedded
    for block in model.blocks:
        h = block(h, documents)
    h = model.final_norm(h)
    labels = next_labels(tokens, ids)
    losses = [F.cross_entropy(model.lm_head(h).flatten(0, 1), labels.flatten(), reduction="sum")]
    for depth in (1, 2):
        module = model.mtp[min(depth, len(model.mtp)) - 1]
        later = torch.zeros_like(embedded)
        for place in range(tokens.shape[1] - depth):
            if ids[0, place] == ids[0, place + depth]:
                later[:, place] = embedded[:, place + depth]
        h = module.eh_proj(torch.cat((module.enorm(later), module.hnorm(h)), -1))
        for block in module.blocks:
            h = block(h, documents)
        h = module.final_norm(h)
        wanted = later_labels(labels, documents, depth=depth)
        losses.append(F.cross_entropy(model.lm_head(h).flatten(0, 1), wanted.flatten(), reduction="sum"))
    return losses


@pytest.mark.parametrize("share_depths", [False, True])
def test_value_is_the_next_token_loss_and_gradients_are_of_all(share_depths):
    model = double(pattern="M*/*-/*-", mtp=replace(TINY_MTP, share_depths=share_depths))
    assert len(model.mtp) == (1 if share_depths else 2)
    ids, tokens = document_ids(9, 11), draw()
    labels = next_labels(tokens, ids)
    loss = model(tokens, document_ids=ids, labels=labels)
    main, first, second = by_hand(model, tokens, ids)
    torch.testing.assert_close(loss, main)
    for depth, wanted in ((1, first), (2, second)):
        value, count = model.extra_losses[f"mtp_{depth}"]
        torch.testing.assert_close(value, wanted.detach())
        assert count == (8 - depth) + (10 - depth)  # the documents have 8 and 10 labels of the next token
    parameters = list(model.parameters())
    found = torch.autograd.grad(loss, parameters)
    wanted = torch.autograd.grad(main + 0.3 * (first + second) / 2, parameters)
    for left, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(left, right)
        assert left.any()


def test_evaluation_leaves_the_depths_out():
    model = double(pattern="M*/*")
    ids, tokens = document_ids(20), draw()
    calls = []
    model.mtp[0].register_forward_hook(lambda *args: calls.append(args))
    with torch.no_grad():
        model(tokens, document_ids=ids, labels=tokens)
    assert not calls
    model(tokens, document_ids=ids, labels=tokens)
    assert len(calls) == 1


def test_gradients_stay_in_their_document():
    model = initialized(tiny_model(pattern="M*/M*/M*"))
    ids = document_ids(7, 8, 5)
    tokens = torch.arange(20)[None]
    labels = next_labels(tokens, ids)
    model(tokens, document_ids=ids, labels=labels.where(ids == 1, IGNORE_INDEX)).backward()
    reached = model.embedding.weight.grad[:20].abs().sum(dim=1) > 0
    # Nothing is predicted from the last token of a document.
    assert reached.nonzero().flatten().tolist() == list(range(7, 14))


def test_penalties_of_the_depths_count():
    cfg = tiny_model(pattern="M/E", moe=replace(tiny_model().moe, z_loss_weight=0.1))
    model = initialized(cfg)
    ids, tokens = document_ids(20), draw()
    model(tokens, document_ids=ids, labels=tokens).backward()
    assert set(model.extra_losses) == {"mtp_1", "router"}
    penalty, num_labels = model.extra_losses["router"]
    assert penalty > 0
    assert num_labels == tokens.numel()
    assert model.mtp[0].blocks[0].mixer.router.weight.grad.any()
