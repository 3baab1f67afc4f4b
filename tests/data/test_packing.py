from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4_train.data.batch import IGNORE_INDEX
from nvfp4_train.data.error import DataError
from nvfp4_train.data.indexed import IndexedTokens
from nvfp4_train.data.packing import PackedTokens
from nvfp4_train.data.rows import read_rows
from nvfp4_train.data.source import SourceTokens
from tests.support.token_files import GOLDEN_PAIRS, write_pair

X = IGNORE_INDEX


def pack(tmp_path, documents, *, length, vocab_size=100, **options):
    source = SourceTokens([write_pair(tmp_path / "pair", documents)])
    return PackedTokens(source, sequence_length=length, vocab_size=vocab_size, **options)


def test_hand_made_corpus(tmp_path):
    # Stream: 1 2 0 | 3 0 | (empty) | 4 5 6 7 0 | 8
    packed = pack(tmp_path, [[1, 2, 0], [3, 0], [], [4, 5, 6, 7, 0], [8]], length=5)
    assert packed.num_samples == 2
    rows = read_rows(packed, np.asarray([0, 1]))
    assert rows.tokens.tolist() == [[1, 2, 0, 3, 0], [4, 5, 6, 7, 0]]
    assert rows.labels.tolist() == [[2, 0, X, 0, X], [5, 6, 7, 0, X]]
    assert rows.document_ids.tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]]
    assert rows.position_ids.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]


def test_document_cut_by_a_row_border_continues_with_position_zero(tmp_path):
    packed = pack(tmp_path, [[1, 2, 3, 4, 5, 0], [6, 7, 8]], length=4)
    rows = read_rows(packed, np.asarray([0, 1]))
    assert rows.labels.tolist() == [[2, 3, 4, 5], [0, X, 7, 8]]
    assert rows.position_ids.tolist() == [[0, 1, 2, 3], [0, 1, 0, 1]]
    assert rows.document_ids.tolist() == [[0, 0, 0, 0], [0, 0, 1, 1]]


def test_dtypes(tmp_path):
    batch = read_rows(pack(tmp_path, [[1, 2, 3, 4]], length=3), np.asarray([0])).batch(microbatch_index=2)
    assert [str(t.dtype) for t in (batch.tokens, batch.labels, batch.document_ids, batch.position_ids)] == [
        "torch.int64",
        "torch.int64",
        "torch.int32",
        "torch.int64",
    ]
    assert batch.microbatch_index == 2


def test_documents_of_several_sequences_are_one_document():
    source = IndexedTokens(GOLDEN_PAIRS / "multi_seq_modes_int32")
    packed = PackedTokens(SourceTokens([source]), sequence_length=source.num_tokens - 1, vocab_size=1 << 20)
    row = read_rows(packed, np.asarray([0]))
    lengths = [len(source.document(i)) for i in range(source.num_documents)]
    expected = np.repeat(np.arange(sum(length > 0 for length in lengths)), [length for length in lengths if length])
    assert row.document_ids[0].tolist() == expected[:-1].tolist()


def test_number_of_samples_is_megatrons():
    # 299 samples of 64 tokens from 19144 tokens, as the golden README says.
    source = SourceTokens([IndexedTokens(GOLDEN_PAIRS / "docsA_uint16")])
    packed = PackedTokens(source, sequence_length=64, vocab_size=32000)
    assert packed.num_samples == 299


def slow_rows(documents, length):
    """The definition, token by token."""
    stream = [(token, number) for number, document in enumerate(documents) for token in document]
    for first in range(0, len(stream) - length, length):
        part = stream[first : first + length + 1]
        labels = [b[0] if a[1] == b[1] else X for a, b in pairwise(part)]
        numbers = [number for _, number in part[:-1]]
        positions = [i - max(j for j in range(i + 1) if j == 0 or numbers[j] != numbers[j - 1]) for i in range(length)]
        yield [token for token, _ in part[:-1]], labels, numbers, positions


@settings(max_examples=40, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, 99), max_size=9), min_size=1, max_size=9),
    length=st.integers(1, 7),
)
def test_rows_equal_the_definition(tmp_path_factory, documents, length):
    expected = list(slow_rows(documents, length))
    if not expected:
        return
    packed = pack(tmp_path_factory.mktemp("pair"), documents, length=length)
    rows = read_rows(packed, np.arange(packed.num_samples))
    assert packed.num_samples == len(expected)
    for row, (tokens, labels, numbers, positions) in enumerate(expected):
        assert rows.tokens[row].tolist() == tokens
        assert rows.labels[row].tolist() == labels
        assert rows.position_ids[row].tolist() == positions
        same = np.diff(rows.document_ids[row]) == 0
        assert same.tolist() == (np.diff(numbers) == 0).tolist()
        assert np.all(np.diff(rows.document_ids[row]) >= 0)


@pytest.mark.parametrize("documents", [[[1]], [[], [1, 2]], [[1, 2, 3, 4]]])
def test_too_few_tokens_for_one_sequence(tmp_path, documents):
    with pytest.raises(DataError, match="at least 5") as caught:
        pack(tmp_path, documents, length=4)
    assert f"{sum(map(len, documents))} tokens" in str(caught.value)


def test_token_outside_the_vocabulary_is_named(tmp_path):
    packed = pack(tmp_path, [[1, 2, 3, 49, 5, 50, 7, 8]], length=3, vocab_size=50)
    read_rows(packed, np.asarray([0]))
    with pytest.raises(DataError, match=r"token id 50 at token 5\n.*ids from 0 to 49"):
        read_rows(packed, np.asarray([1]))


def test_negative_token_is_named(tmp_path):
    source = SourceTokens([write_pair(tmp_path / "pair", [[1, 2, -3, 4]], dtype="<i4")])
    packed = PackedTokens(source, sequence_length=3, vocab_size=50)
    with pytest.raises(DataError, match=r"token id -3 at token 2\n"):
        read_rows(packed, np.asarray([0]))


def test_labels_across_documents_count_where_the_user_wants_that(tmp_path):
    packed = pack(tmp_path, [[1, 2, 0], [3, 0], [], [4, 5]], length=3, count_document_ends=True)
    rows = read_rows(packed, np.asarray([0, 1]))
    assert rows.labels.tolist() == [[2, 0, 3], [0, 4, 5]]
    assert rows.document_ids.tolist() == [[0, 0, 0], [0, 0, 1]]
