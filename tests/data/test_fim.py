from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4_train.data.fim import FimRule, FimTokens
from nvfp4_train.data.packing import PackedTokens
from nvfp4_train.data.rows import read_rows
from nvfp4_train.data.source import SourceTokens
from tests.support.token_files import write_pair

PREFIX, MIDDLE, SUFFIX, END = 97, 98, 99, 0


def rule(**changes):
    fields = {"rate": 0.5, "spm_rate": 0.5, "document_end": END, "seed": "1/web"}
    return FimRule(**(fields | changes), prefix=PREFIX, middle=MIDDLE, suffix=SUFFIX)


def source_of(folder, documents):
    return SourceTokens([write_pair(folder / "pair", documents)])


def documents_of(stream):
    starts = stream.document_starts(0, stream.num_documents + 1).tolist()
    return [stream.read(first, last).tolist() if first < last else [] for first, last in pairwise(starts)]


def restore(document):
    """The original of a document that became a task."""
    at = {token: document.index(token) for token in (PREFIX, MIDDLE, SUFFIX)}
    end = [END] if document[-1] == END else []
    document = document[: len(document) - len(end)]
    if at[SUFFIX] == 1:  # PREFIX SUFFIX s MIDDLE p m
        suffix, rest = document[2 : at[MIDDLE]], document[at[MIDDLE] + 1 :]
        return rest + suffix + end
    prefix, suffix = document[1 : at[SUFFIX]], document[at[SUFFIX] + 1 : at[MIDDLE]]
    return prefix + document[at[MIDDLE] + 1 :] + suffix + end


@pytest.fixture(scope="module")
def documents():
    rng = np.random.default_rng(3)
    return [[*rng.integers(1, 90, size=size).tolist(), END] for size in rng.integers(0, 30, size=1500)]


@pytest.fixture(scope="module")
def source(tmp_path_factory, documents):
    return source_of(tmp_path_factory.mktemp("fim"), documents)


def test_every_document_is_there_in_one_of_three_forms(source, documents):
    changed = documents_of(FimTokens(source, rule=rule()))
    assert len(changed) == len(documents)
    forms = {"same": 0, "psm": 0, "spm": 0}
    for before, after in zip(documents, changed, strict=True):
        if PREFIX not in after:
            assert after == before
            forms["same"] += 1
        else:
            assert restore(after) == before
            forms["spm" if after[1] == SUFFIX else "psm"] += 1
    long = sum(len(document) >= 4 for document in documents)
    tasks = forms["psm"] + forms["spm"]
    assert abs(tasks / long - 0.5) < 0.05
    # A PSM document with an empty prefix reads as SPM, which is why there are more of these.
    assert 0.45 < forms["spm"] / tasks < 0.65


@pytest.mark.parametrize(("spm_rate", "second"), [(0.0, "psm"), (1.0, "spm")])
def test_the_form_follows_its_rate(source, spm_rate, second):
    changed = documents_of(FimTokens(source, rule=rule(rate=1.0, spm_rate=spm_rate)))
    tasks = [document for document in changed if PREFIX in document]
    assert len(tasks) > 1000
    suffix_first = sum(document[1] == SUFFIX for document in tasks) / len(tasks)
    # The prefix of a PSM document may be empty.
    assert suffix_first == 1 if second == "spm" else suffix_first < 0.25


def test_cuts_are_spread_over_the_document(tmp_path):
    source = source_of(tmp_path, [list(range(1, 41))] * 3000)
    changed = documents_of(FimTokens(source, rule=rule(rate=1.0, spm_rate=0.0)))
    prefixes = np.asarray([document.index(SUFFIX) - 1 for document in changed])
    middles = np.asarray([len(document) - 1 - document.index(MIDDLE) for document in changed])
    # Two uniform cuts: each of the three parts is a third of the document on average.
    assert abs(prefixes.mean() - 40 / 3) < 1
    assert abs(middles.mean() - 40 / 3) < 1
    assert prefixes.min() == 0
    assert prefixes.max() > 35


@pytest.fixture(scope="module")
def whole(source):
    return np.concatenate(
        [np.asarray(document, dtype=np.int64) for document in documents_of(FimTokens(source, rule=rule()))]
    )


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_piece_is_a_piece_of_the_whole(source, whole, data):
    stream = FimTokens(source, rule=rule())
    starts = stream.document_starts(0, stream.num_documents + 1)
    assert stream.num_tokens == len(whole) == starts[-1]
    first = data.draw(st.integers(0, len(whole) - 1))
    last = data.draw(st.integers(first + 1, min(first + 500, len(whole))))
    assert stream.read(first, last).tolist() == whole[first:last].tolist()
    inside = starts[:-1]
    assert stream.starts_within(first, last) == inside[(inside > first) & (inside < last)].tolist()
    low = data.draw(st.integers(0, stream.num_documents))
    high = data.draw(st.integers(low, stream.num_documents + 1))
    assert stream.document_starts(low, high).tolist() == starts[low:high].tolist()


def test_choices_depend_on_seed_and_document_only(source, tmp_path, documents):
    first, again, other = (
        documents_of(FimTokens(source, rule=rule(seed=seed))) for seed in ("1/web", "1/web", "2/web")
    )
    assert first == again
    assert first != other
    # Documents that are added behind change nothing before them.
    longer = documents_of(FimTokens(source_of(tmp_path, [*documents, [5] * 50]), rule=rule()))
    assert longer[:-1] == first


def test_a_rate_of_zero_changes_nothing(source, documents):
    assert documents_of(FimTokens(source, rule=rule(rate=0.0))) == documents


def test_without_an_end_token_every_token_may_move(tmp_path):
    source = source_of(tmp_path, [[1, 2, 3, 4, 5, END]] * 200)
    changed = documents_of(FimTokens(source, rule=rule(rate=1.0, document_end=None)))
    assert all(sorted(document)[:6] == [END, 1, 2, 3, 4, 5] for document in changed)
    assert any(document[-1] != END for document in changed)


def test_documents_shorter_than_the_smallest_task_stay(tmp_path):
    short = [[1], [], [2, 3], [4, 5, 6]]
    assert documents_of(FimTokens(source_of(tmp_path, short), rule=rule(rate=1.0))) == short


def test_rows_of_a_changed_stream(source):
    packed = PackedTokens(FimTokens(source, rule=rule()), sequence_length=32, vocab_size=100)
    rows = read_rows(packed, np.arange(packed.num_samples))
    assert (rows.tokens == MIDDLE).sum() == (rows.tokens == PREFIX).sum() > 300
