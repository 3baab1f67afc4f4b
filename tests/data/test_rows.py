import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4_train.data.rows import finish_rows


def finish(starts, *, length):
    tokens = np.zeros((len(starts), length), dtype=np.int64)
    return finish_rows(tokens, tokens.copy(), starts)


def test_documents_are_numbered_in_each_row():
    rows = finish([[2, 3], [], [4]], length=5)
    assert rows.document_ids.tolist() == [[0, 0, 1, 2, 2], [0] * 5, [0, 0, 0, 0, 1]]
    assert rows.position_ids.tolist() == [[0, 1, 0, 0, 1], [0, 1, 2, 3, 4], [0, 1, 2, 3, 0]]
    assert rows.document_ids.dtype == np.int32
    assert rows.position_ids.dtype == np.int64


def test_empty_documents_and_borders_behind_the_row_are_no_documents():
    rows = finish([[2, 2, 2, 4, 4], [1, 4]], length=4)
    assert rows.document_ids.tolist() == [[0, 0, 1, 1], [0, 1, 1, 1]]


@settings(max_examples=60, deadline=None)
@given(starts=st.lists(st.lists(st.integers(1, 9), max_size=8).map(sorted), min_size=1, max_size=5))
def test_every_row_is_that_of_a_walk_along_it(starts):
    rows = finish(starts, length=9)
    for row, borders in enumerate(starts):
        number = position = 0
        for column in range(9):
            if column in borders:
                number, position = number + 1, 0
            assert (rows.document_ids[row, column], rows.position_ids[row, column]) == (number, position)
            position += 1


def test_a_batch_has_the_types_that_the_model_reads():
    batch = finish([[1]], length=3).batch(microbatch_index=7)
    assert [str(t.dtype) for t in (batch.tokens, batch.labels, batch.document_ids, batch.position_ids)] == [
        "torch.int64", "torch.int64", "torch.int32", "torch.int64",
    ]  # fmt: skip
    assert batch.microbatch_index == 7
