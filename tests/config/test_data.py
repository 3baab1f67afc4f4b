from dataclasses import replace

import pytest

from tests.support.configs import composed, problems_of

VALID = composed("data=text_files", "data.paths=[a.txt]").data


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"cache_dir": ""}, "cache_dir"),
        ({"validation_fraction": 0.0}, "validation_fraction"),
        ({"validation_fraction": 1.0}, "validation_fraction"),
        ({"tokenizer_vocab_size": 259}, "tokenizer_vocab_size"),
        ({"prefetch": -1}, "prefetch"),
        ({"paths": []}, "paths"),
        ({"paths": ["a", ""]}, "paths"),
        ({"jsonl_key": ""}, "jsonl_key"),
    ],
)
def test_a_violated_rule_names_its_key(changes, key):
    assert [problem.key for problem in problems_of(lambda: replace(VALID, **changes))] == [key]


def test_the_standard_library_is_checked_too():
    stdlib = composed().data
    assert [problem.key for problem in problems_of(lambda: replace(stdlib, prefetch=-1))] == ["prefetch"]


def test_the_tokenizer_has_the_size_of_the_vocabulary():
    assert composed("model.vocab_size=1024").data.tokenizer_vocab_size == 1024
