import pytest

from nvfp4_train.config.pattern import LayerKind, known_kinds, parse_pattern
from tests.support.configs import problems_of


def test_one_letter_is_one_block():
    assert parse_pattern("M-*") == (LayerKind.mamba, LayerKind.mlp, LayerKind.attention)


def test_each_wrong_letter_is_pointed_at():
    (problem,) = problems_of(lambda: parse_pattern("M-X*m"))
    rule, pattern, pointer = problem.rule.splitlines()
    assert "'X' at position 2" in rule
    assert "'m' at position 4" in rule
    assert [pattern[index] for index, mark in enumerate(pointer) if mark == "^"] == ["X", "m"]
    assert problem.fix == "use only M (mamba), * (attention), - (mlp)"


@pytest.mark.parametrize("pattern", ["", " ", "M M"])
def test_nothing_and_spaces_are_no_blocks(pattern):
    assert [problem.key for problem in problems_of(lambda: parse_pattern(pattern))] == ["pattern"]


def test_the_known_part_of_a_faulty_pattern():
    assert known_kinds("MX-") == {0: LayerKind.mamba, 2: LayerKind.mlp}
