from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4_train.data.error import DataError
from nvfp4_train.data.indexed import IndexedTokens
from nvfp4_train.data.source import SourceTokens
from tests.support.token_files import GOLDEN_PAIRS, write_pair

files = st.lists(st.lists(st.lists(st.integers(0, 99), max_size=6), max_size=6), min_size=1, max_size=4)


def definition(shards):
    documents = [document for shard in shards for document in shard]
    starts = [0, *accumulate(map(len, documents))]
    return [token for document in documents for token in document], starts


@settings(max_examples=60, deadline=None)
@given(shards=files, data=st.data())
def test_files_are_read_as_one(tmp_path_factory, shards, data):
    tokens, starts = definition(shards)
    if not tokens:
        return
    folder = tmp_path_factory.mktemp("shards")
    source = SourceTokens([write_pair(folder / str(index), shard) for index, shard in enumerate(shards)])
    assert (source.num_tokens, source.num_documents) == (len(tokens), len(starts) - 1)
    first = data.draw(st.integers(0, len(tokens) - 1))
    last = data.draw(st.integers(first + 1, len(tokens)))
    assert source.read(first, last).tolist() == tokens[first:last]
    assert source.starts_within(first, last) == [at for at in starts[:-1] if first < at < last]
    low = data.draw(st.integers(0, len(starts) - 1))
    high = data.draw(st.integers(low, len(starts)))
    assert source.document_starts(low, high).tolist() == starts[low:high]


@pytest.mark.parametrize("shards", [[[[0], []], [[0]]], [[[0]], [[]], [[0]]], [[[0]], [[], []], [], [[], [0]]]])
def test_empty_documents_between_files_repeat_the_border(tmp_path, shards):
    _, starts = definition(shards)
    source = SourceTokens([write_pair(tmp_path / str(index), shard) for index, shard in enumerate(shards)])
    assert source.starts_within(0, 2) == [at for at in starts[:-1] if 0 < at < 2]


def test_documents_of_several_sequences_are_found():
    pair = IndexedTokens(GOLDEN_PAIRS / "multi_seq_modes_int32")
    source = SourceTokens([pair, IndexedTokens(GOLDEN_PAIRS / "docsB_int32")])
    starts = pair.document_starts()[:-1]
    assert source.starts_within(0, pair.num_tokens) == [at for at in starts.tolist() if at > 0]
    assert source.starts_within(pair.num_tokens - 1, pair.num_tokens + 1)[-1] == pair.num_tokens


def test_the_place_of_a_token_is_in_its_file(tmp_path):
    source = SourceTokens([write_pair(tmp_path / name, [[1, 2], [3]]) for name in ("a", "b")])
    assert source.place(2) == (tmp_path / "a.bin", 2)
    assert source.place(4) == (tmp_path / "b.bin", 1)


def test_a_source_without_tokens_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"no token in 2 file\(s\): an empty source"):
        SourceTokens([write_pair(tmp_path / "a", []), write_pair(tmp_path / "b", [[], []])])


def test_file_of_floats_is_refused(tmp_path):
    with pytest.raises(DataError, match="float32 values"):
        SourceTokens([write_pair(tmp_path / "pair", [[1, 2, 3]], dtype="<f4")])


def test_reading_copies_nothing_where_one_file_has_it(tmp_path):
    pair = write_pair(tmp_path / "pair", [[1, 2, 3, 4]])
    assert np.shares_memory(SourceTokens([pair]).read(1, 3), pair.tokens)
