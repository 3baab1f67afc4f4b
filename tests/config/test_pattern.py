import json
from pathlib import Path

import pytest

from nvfp4_train.config.pattern import (
    LayerKind,
    LayerPattern,
    allocate_pattern,
    count_blocks,
    known_kinds,
    known_mtp_kinds,
    parse_pattern,
)
from tests.support.configs import problems_of

GOLDEN = Path(__file__).parents[1] / "golden" / "megatron_data"


def test_one_letter_is_one_block():
    assert parse_pattern("M-*") == (LayerKind.mamba, LayerKind.mlp, LayerKind.attention)


def test_each_wrong_letter_is_pointed_at():
    (problem,) = problems_of(lambda: parse_pattern("M-X*m"))
    rule, pattern, pointer = problem.rule.splitlines()
    assert "'X' at position 2" in rule
    assert "'m' at position 4" in rule
    assert [pattern[index] for index, mark in enumerate(pointer) if mark == "^"] == ["X", "m"]
    assert "M (mamba), * (attention), - (mlp), E (moe)" in problem.fix


@pytest.mark.parametrize("pattern", ["", " ", "M M"])
def test_nothing_and_spaces_are_no_blocks(pattern):
    assert [problem.key for problem in problems_of(lambda: parse_pattern(pattern))] == ["pattern"]


def test_the_known_part_of_a_faulty_pattern():
    assert known_kinds("MX-") == {0: LayerKind.mamba, 2: LayerKind.mlp}


def test_segments_and_depths():
    pattern = LayerPattern.parse("M-||M*-/*E/*E")
    assert [len(segment) for segment in pattern.segments] == [2, 0, 3]
    assert pattern.layers == parse_pattern("M-M*-")
    assert pattern.mtp == (LayerKind.attention, LayerKind.moe)
    assert pattern.num_mtp_depths == 2
    assert str(pattern) == "M-||M*-/*E/*E"


def test_a_plain_pattern_is_one_segment():
    pattern = LayerPattern.parse("M-")
    assert (len(pattern.segments), pattern.mtp, pattern.num_mtp_depths) == (1, (), 0)


def test_separators_are_no_blocks():
    assert count_blocks("M|x-/E/E") == 3
    assert known_kinds("M|x-/E/E") == {0: LayerKind.mamba, 2: LayerKind.mlp}
    assert known_mtp_kinds("M|x-/Ey/Ey") == {0: LayerKind.moe}
    assert known_mtp_kinds("M") == {}


@pytest.mark.parametrize(
    ("pattern", "places", "words"),
    [
        ("|", [0], "at least one block"),
        ("/M", [0], "at least one block"),
        ("M/", [1], "none after position 1"),
        ("M/M//M", [3], "none after position 3"),
        ("M/M|M/MM", [3], "main model only"),
        ("M/MM/M-", [6], "must be alike"),
        ("M/MM/MMM", [7], "must be alike"),
        ("M/MM/M", [6], "must be alike"),
        ("M/Q|/M", [2], "'Q' at position 2"),
    ],
)
def test_structural_faults_point_at_their_character(pattern, places, words):
    (problem,) = problems_of(lambda: LayerPattern.parse(pattern))
    rule, shown, pointer = problem.rule.splitlines()
    assert words in rule
    assert shown.strip() == pattern
    assert [index - 10 for index, mark in enumerate(pointer) if mark == "^"] == places


def test_ratios_give_the_patterns_of_megatron():
    golden = json.loads((GOLDEN / "peer_golden.json").read_text())["alloc"]
    assert len(golden) == 5
    for key, wanted in golden.items():
        num_layers, attention, mlp = key.split(",")
        found = allocate_pattern(int(num_layers), attention_ratio=float(attention), mlp_ratio=float(mlp))
        assert found == wanted, key


@pytest.mark.parametrize("num_layers", [1, 2, 7, 10, 52])
@pytest.mark.parametrize("attention", [0.0, 0.1, 1 / 3, 0.5])
@pytest.mark.parametrize("mlp", [0.0, 0.2, 0.4])
def test_ratios_are_kept(num_layers, attention, mlp):
    pattern = allocate_pattern(num_layers, attention_ratio=attention, mlp_ratio=mlp)
    assert len(pattern) == num_layers
    assert pattern.count("*") == round(num_layers * attention)
    assert pattern.count("-") == round(num_layers * mlp)


@pytest.mark.parametrize(
    ("num_layers", "attention", "mlp"), [(0, 0.1, 0.1), (8, -0.1, 0.1), (8, 0.6, 0.6), (7, 0.5, 0.5)]
)
def test_impossible_ratios(num_layers, attention, mlp):
    with pytest.raises(ValueError, match=r"num_layers|ratio|fit"):
        allocate_pattern(num_layers, attention_ratio=attention, mlp_ratio=mlp)
