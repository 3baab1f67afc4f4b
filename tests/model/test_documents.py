import pytest
import torch

from nvfp4_train.model.documents import locate_documents
from tests.support.models import document_ids


def test_positions_restart_in_each_document():
    documents = locate_documents(document_ids(3, 1, 2))
    assert documents.positions.tolist() == [[0, 1, 2, 0, 0, 1]]


def test_given_positions_are_kept():
    positions = torch.tensor([[5, 6, 7]])
    assert locate_documents(document_ids(3), positions).positions is positions


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"\(1, 2\).*\(1, 3\)"):
        locate_documents(document_ids(3), torch.zeros(1, 2, dtype=torch.int64))


def test_causal_mask_keeps_documents_apart():
    mask = locate_documents(document_ids(2, 1)).causal_mask()
    assert mask.tolist() == [[[True, False, False], [True, True, False], [False, False, True]]]


def test_one_per_row_needs_every_row():
    assert locate_documents(torch.cat((document_ids(3), document_ids(3) + 1))).one_per_row
    assert not locate_documents(torch.cat((document_ids(3), document_ids(2, 1)))).one_per_row


def test_other_devices_are_never_inspected():
    assert not locate_documents(document_ids(3).to("meta")).one_per_row


def test_spans_list_every_document():
    ids = torch.cat((document_ids(2, 3), document_ids(5)))
    spans = locate_documents(ids).spans
    assert [(span.row, span.start, span.end) for span in spans] == [(0, 0, 2), (0, 2, 5), (1, 0, 5)]
    assert locate_documents(ids.to("meta")).spans is None


def test_a_window_limits_the_mask():
    mask = locate_documents(document_ids(4, 1)).causal_mask(window_tokens=2)
    assert mask[0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1],
    ]
