import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4_train.data import best_fit
from nvfp4_train.data.batch import IGNORE_INDEX
from nvfp4_train.data.best_fit import BestFitTokens, build_best_fit, pack_window
from nvfp4_train.data.error import DataError
from nvfp4_train.data.rows import read_rows
from nvfp4_train.data.source import SourceTokens
from tests.support.token_files import write_pair

X, PAD = IGNORE_INDEX, 77


def pack(folder, documents, *, length, name="pair"):
    source = SourceTokens([write_pair(folder / name, documents)])
    table = build_best_fit(source, sequence_length=length, fingerprint=repr(documents), cache_dir=folder / "cache")
    return BestFitTokens(source, sequence_length=length, vocab_size=100, pad_token=PAD, table=table)


def all_rows(packed):
    return read_rows(packed, np.arange(packed.num_samples))


def test_hand_made_corpus(tmp_path):
    # Columns: 4, 1, none, 2, none.
    packed = pack(tmp_path, [[1, 2, 3, 4, 0], [5, 0], [], [6, 7, 0], [8]], length=4)
    rows = all_rows(packed)
    assert rows.tokens.tolist() == [[1, 2, 3, 4], [6, 7, 5, PAD]]
    assert rows.labels.tolist() == [[2, 3, 4, 0], [7, 0, 0, X]]
    assert rows.document_ids.tolist() == [[0, 0, 0, 0], [0, 0, 1, 2]]
    assert rows.position_ids.tolist() == [[0, 1, 2, 3], [0, 1, 0, 0]]


def test_a_long_document_is_cut_and_loses_no_label(tmp_path):
    packed = pack(tmp_path, [list(range(1, 12)), [20, 21]], length=4)
    rows = all_rows(packed)
    assert rows.tokens.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 20, PAD]]
    assert rows.labels.tolist() == [[2, 3, 4, 5], [6, 7, 8, 9], [10, 11, 21, X]]


def pieces_of(packed):
    """Tokens with the label behind them, one list a document of a row, padding left out."""
    rows = all_rows(packed)
    for row in range(packed.num_samples):
        for number in np.unique(rows.document_ids[row]):
            inside = rows.document_ids[row] == number
            tokens, labels = rows.tokens[row, inside], rows.labels[row, inside]
            if labels[0] == X:
                assert np.all(labels == X)
                assert np.all(tokens == PAD)
                continue
            assert labels[:-1].tolist() == tokens[1:].tolist()
            yield [*tokens.tolist(), int(labels[-1])]


@settings(max_examples=60, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, 50), max_size=12), min_size=1, max_size=20),
    length=st.integers(1, 7),
    window=st.sampled_from([3, 1 << 16]),
)
def test_documents_that_fit_are_whole_and_every_label_is_there_once(tmp_path_factory, documents, length, window):
    if not any(len(document) > 1 for document in documents):
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(best_fit, "WINDOW", window)
        packed = pack(tmp_path_factory.mktemp("best_fit"), documents, length=length)
    pieces = sorted(pieces_of(packed))
    expected = []
    for document in documents:
        expected += [document[at : at + length + 1] for at in range(0, len(document) - 1, length)]
    assert pieces == sorted(expected)


def one_by_one(lengths, capacity):
    """Best-fit decreasing, one piece after the other: the number of rows."""
    free: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in free if room >= length]
        if fitting:
            free.remove(min(fitting))
            free.append(min(fitting) - length)
        else:
            free.append(capacity - length)
    return len(free)


@settings(max_examples=80, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=80))
def test_as_few_rows_as_best_fit_decreasing(lengths):
    ends = np.cumsum(np.asarray(lengths) + 1)
    pieces = pack_window(ends - np.asarray(lengths) - 1, ends, capacity=20)
    assert sorted(pieces.lengths.tolist()) == sorted(lengths)
    used = np.add.reduceat(pieces.lengths, np.cumsum(pieces.row_sizes) - pieces.row_sizes)
    assert used.max() <= 20
    assert len(used) <= one_by_one(lengths, 20) + 1


def test_little_is_padding_where_documents_are_short():
    lengths = np.random.default_rng(0).integers(1, 400, size=20_000)
    ends = np.cumsum(lengths + 1)
    pieces = pack_window(ends - lengths - 1, ends, capacity=1024)
    assert lengths.sum() / (len(pieces.row_sizes) * 1024) > 0.995


def test_documents_behind_a_window_change_no_row_before_it(tmp_path, monkeypatch):
    monkeypatch.setattr(best_fit, "WINDOW", 4)
    documents = [list(range(size)) for size in (3, 5, 2, 6, 4, 4, 3, 2)]
    short, long = (pack(tmp_path, documents[:end], length=6, name=str(end)) for end in (4, 8))
    count = short.num_samples
    assert all_rows(short).tokens.tolist() == all_rows(long).tokens.tolist()[:count]
    assert long.num_samples > count


def test_the_table_is_made_once(tmp_path, monkeypatch):
    pack(tmp_path, [[1, 2, 3]], length=4)
    monkeypatch.setattr(best_fit, "pack_window", None)
    assert pack(tmp_path, [[1, 2, 3]], length=4).num_samples == 1


def test_documents_without_a_label_are_refused(tmp_path):
    with pytest.raises(DataError, match="no document of two tokens or more"):
        pack(tmp_path, [[1], [], [2]], length=4)


def test_token_outside_the_vocabulary_is_named(tmp_path):
    packed = pack(tmp_path, [[1, 2], [3, 100, 4]], length=4)
    with pytest.raises(DataError, match=r"token id 100 at token 3\n"):
        all_rows(packed)
