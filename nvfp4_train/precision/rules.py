"""Which Linears leave the recipe and stay in the compute dtype, and why."""

import re
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from nvfp4_train.config.problem import Problem
from nvfp4_train.config.recipe import KeepBf16

_BLOCK_NAME = re.compile(r"blocks\.(\d+)\.")
_MTP_PREFIX = "mtp."


@dataclass(frozen=True)
class Placement:
    """What the rules say about one Linear: whether it is kept in the compute dtype, and the rule that decided."""

    is_kept: bool
    why: str


def place_linears(names: list[str], cfg: KeepBf16, *, num_blocks: int, recipe_name: str) -> dict[str, Placement]:
    """Return the placement of every Linear: the first of first_blocks, last_blocks, mtp and modules that applies."""
    return {name: _place(name, cfg, num_blocks, recipe_name) for name in names}


def rule_problems(names: list[str], cfg: KeepBf16, *, num_blocks: int) -> list[Problem]:
    """Return what is wrong with the rules for these Linears: numbers that are too large, globs that match none."""
    problems = [
        Problem(
            key=f"recipe.keep_bf16.{key}",
            value=value,
            rule=f"must not exceed the number of blocks of the model, {num_blocks}",
            fix=f"use at most {num_blocks}",
        )
        for key, value in (("first_blocks", cfg.first_blocks), ("last_blocks", cfg.last_blocks))
        if value > num_blocks
    ]
    for glob in cfg.modules:
        if not any(fnmatchcase(name, glob) for name in names):
            close = get_close_matches(glob, names, n=3, cutoff=0.4) or names[:3]
            problems.append(
                Problem(
                    key="recipe.keep_bf16.modules",
                    value=glob,
                    rule="must match the name of at least one Linear (an embedding, a norm or a convolution is none)",
                    fix=f"use a name or glob such as {', '.join(close)}, or remove it",
                )
            )
    return problems


def _place(name: str, cfg: KeepBf16, num_blocks: int, recipe_name: str) -> Placement:
    match = _BLOCK_NAME.match(name)
    if match is not None:
        index = int(match[1])
        if index < cfg.first_blocks:
            return Placement(True, f"first_blocks: block {index} of {num_blocks}")
        if index >= num_blocks - cfg.last_blocks:
            return Placement(True, f"last_blocks: block {index} of {num_blocks}")
    if cfg.mtp and name.startswith(_MTP_PREFIX):
        return Placement(True, "mtp: multi-token prediction")
    for glob in cfg.modules:
        if fnmatchcase(name, glob):
            return Placement(True, f"modules: {glob}")
    return Placement(False, f"recipe {recipe_name}")
