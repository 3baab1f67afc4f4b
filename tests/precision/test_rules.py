"""Which Linears are kept in the compute dtype, and what is said about rules that match nothing."""

import pytest

from nvfp4_train.config.recipe import KeepBf16
from nvfp4_train.precision.rules import place_linears, rule_problems

NAMES = [f"blocks.{index}.mixer.{linear}" for index in range(12) for linear in ("in_proj", "out_proj")] + ["lm_head"]


def kept(*, first: int = 0, last: int = 0, modules: tuple[str, ...] = ()) -> dict[str, str]:
    """Why each kept Linear is kept."""
    cfg = KeepBf16(first_blocks=first, last_blocks=last, modules=list(modules))
    placements = place_linears(NAMES, cfg, num_blocks=12, recipe_name="nvfp4")
    assert list(placements) == NAMES
    assert {placement.why for placement in placements.values() if not placement.is_kept} <= {"recipe nvfp4"}
    return {name: placement.why for name, placement in placements.items() if placement.is_kept}


def test_nothing_is_kept_without_rules():
    assert kept() == {}


def test_leading_and_trailing_blocks():
    assert kept(first=1) == {
        "blocks.0.mixer.in_proj": "first_blocks: block 0 of 12",
        "blocks.0.mixer.out_proj": "first_blocks: block 0 of 12",
    }
    assert set(kept(last=2)) == {name for name in NAMES if name.startswith(("blocks.10.", "blocks.11."))}
    assert kept(last=2)["blocks.11.mixer.in_proj"] == "last_blocks: block 11 of 12"


def test_globs_match_whole_names():
    assert kept(modules=("lm_head",)) == {"lm_head": "modules: lm_head"}
    assert set(kept(modules=("blocks.*.mixer.out_proj",))) == {name for name in NAMES if name.endswith("out_proj")}
    assert set(kept(modules=("blocks.1.*",))) == {"blocks.1.mixer.in_proj", "blocks.1.mixer.out_proj"}
    assert kept(modules=("head", "mixer")) == {}


def test_the_first_rule_that_applies_is_named():
    assert kept(first=12, last=12, modules=("*",))["blocks.3.mixer.in_proj"] == "first_blocks: block 3 of 12"
    assert kept(first=12, last=12, modules=("*",))["lm_head"] == "modules: *"


def test_rules_that_fit_have_no_problems():
    assert rule_problems(NAMES, KeepBf16(first_blocks=12, last_blocks=12, modules=["lm_*"]), num_blocks=12) == []


@pytest.mark.parametrize(
    ("glob", "suggestion"),
    [
        ("lm_haed", "lm_head"),
        ("blocks.3.mixer.inproj", "blocks.3.mixer.in_proj"),
        ("embedding", "blocks.0.mixer.in_proj"),
    ],
)
def test_a_glob_that_matches_no_linear_lists_close_names(glob, suggestion):
    [problem] = rule_problems(NAMES, KeepBf16(first_blocks=0, last_blocks=0, modules=[glob, "lm_head"]), num_blocks=12)
    assert problem.key == "recipe.keep_bf16.modules"
    assert problem.value == glob
    assert suggestion in problem.fix


def test_more_blocks_than_the_model_has_are_refused():
    problems = rule_problems(NAMES, KeepBf16(first_blocks=13, last_blocks=40, modules=[]), num_blocks=12)
    assert [(problem.key, problem.value) for problem in problems] == [
        ("recipe.keep_bf16.first_blocks", 13),
        ("recipe.keep_bf16.last_blocks", 40),
    ]
