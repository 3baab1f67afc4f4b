import hashlib

import pytest

from nvfp4_train.data.corpus import Document
from nvfp4_train.data.split import Split, SplitMethod, split_documents, survey_documents


def document(text: str) -> Document:
    return Document(text=text, digest=hashlib.blake2b(text.encode(), digest_size=16).digest())


MANY = [document(f"document number {number}") for number in range(1000)]


def split(documents, fraction, method=SplitMethod.by_document):
    sides = {side: [] for side in Split}
    for side, part in split_documents(documents, method=method, validation_fraction=fraction):
        sides[side].append(part.text)
    return sides


def test_share_of_validation_is_about_the_fraction():
    # 1000 documents at 0.1: 100 expected, standard deviation 9.5.
    assert 60 < len(split(MANY, 0.1)[Split.validation]) < 140


def test_adding_documents_moves_no_other():
    before, after = split(MANY[:500], 0.1), split(MANY, 0.1)
    for side in Split:
        assert before[side] == after[side][: len(before[side])]


def test_smaller_fraction_takes_a_part_of_the_larger_one():
    assert set(split(MANY, 0.05)[Split.validation]) < set(split(MANY, 0.2)[Split.validation])


def test_survey_counts():
    survey = survey_documents(MANY, validation_fraction=0.1)
    assert survey.num_documents == 1000
    assert survey.num_characters == sum(len(document.text) for document in MANY)
    assert survey.method is SplitMethod.by_document


@pytest.mark.parametrize(("count", "fraction"), [(1, 0.1), (9, 0.1), (49, 0.02), (3, 0.4)])
def test_few_documents_give_their_tails(count, fraction):
    one_sided = [item for item in MANY if int.from_bytes(item.digest[:8], "little") / 2**64 > fraction][:count]
    survey = survey_documents(one_sided, validation_fraction=fraction)
    assert survey.method is SplitMethod.by_tail


def test_a_large_document_among_few_does_not_validate_whole():
    chosen = next(item for item in MANY if int.from_bytes(item.digest[:8], "little") / 2**64 < 0.1)
    others = [item for item in MANY if int.from_bytes(item.digest[:8], "little") / 2**64 > 0.1]
    assert survey_documents([chosen, *others[:8]], validation_fraction=0.1).method is SplitMethod.by_tail
    assert survey_documents([chosen, *others[:9]], validation_fraction=0.1).method is SplitMethod.by_document


def test_tail_is_the_end_from_a_line_on_and_nothing_is_lost():
    text = "\n".join(f"line {number}" for number in range(100))
    sides = split([document(text)], 0.1, SplitMethod.by_tail)
    (train,), (validation,) = sides[Split.train], sides[Split.validation]
    assert train + validation == text
    assert train.endswith("\n")
    assert 0.09 < len(validation) / len(text) < 0.13


def test_tail_of_a_single_line_is_cut_anywhere():
    sides = split([document("x" * 100)], 0.1, SplitMethod.by_tail)
    assert [len(text) for side in Split for text in sides[side]] == [90, 10]


def test_tail_of_a_tiny_document_is_not_an_empty_document():
    sides = split([document("ab")], 0.1, SplitMethod.by_tail)
    assert sides == {Split.train: ["ab"], Split.validation: []}
