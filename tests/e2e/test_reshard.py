"""A checkpoint of any layout goes on in any other: the same weights, optimizer state and histories, the same next step.

To add a layout, add a row to `LAYOUTS`; to add a pair, one to `PAIRS`, with the recipes that it is tried with.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_train.config.recipe import ComputeDtype, RecipeConfig
from nvfp4_train.engine.base import Engine
from nvfp4_train.parallel.runtime import Runtime
from tests.e2e.test_layout_parity import MODEL
from tests.support.configs import composed
from tests.support.engines import (
    amax_histories,
    build_tiny_engine,
    train,
    whole_optimizer_state,
    whole_parameters,
)
from tests.support.ranks import run_on_ranks
from tests.support.recipes import cast_recipe
from tests.support.tiny import parallel_layout

SAVED_STEP = 1

# Ranks, and what differs from a single process.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "dp2": (2, {"replicate": 2}),
    "fsdp2": (2, {"shard": 2}),
    "tp2": (2, {"tp": 2}),
    "hsdp": (4, {"replicate": 2, "shard": 2}),
    "fsdp2 x tp2": (4, {"shard": 2, "tp": 2}),
}
FP32, BOTH = ("fp32",), ("fp32", "fp8_delayed")  # no layout cuts a history: four pairs look at them
PAIRS: dict[tuple[str, str], tuple[str, ...]] = {
    ("dp2", "tp2"): FP32,
    ("tp2", "fsdp2 x tp2"): BOTH,
    ("tp2", "single"): BOTH,
    ("hsdp", "tp2"): FP32,
    ("single", "tp2"): BOTH,
    ("fsdp2 x tp2", "fsdp2"): BOTH,
    ("fsdp2 x tp2", "hsdp"): FP32,
    ("fsdp2", "fsdp2 x tp2"): FP32,
}
CASES = [(*pair, recipe) for pair, recipes in PAIRS.items() for recipe in recipes]
RECIPES: dict[str, RecipeConfig] = {
    "fp32": cast_recipe(ComputeDtype.fp32),
    "fp8_delayed": composed("experiment=tiny", "recipe=fp8_delayed").recipe,
}


@dataclass(kw_only=True)
class State:
    """What an engine holds, whole, and the loss of its next step."""

    parameters: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    histories: dict[str, Tensor]
    next_loss: float


def look(engine: Engine) -> State:
    found = (whole_parameters(engine), whole_optimizer_state(engine), amax_histories(engine))
    [(loss, _)] = train(engine, range(SAVED_STEP, SAVED_STEP + 1))
    return State(parameters=found[0], optimizer=found[1], histories=found[2], next_loss=loss)


def build(runtime: Runtime, name: str, recipe: str, *, seed: int) -> Engine:
    layout = parallel_layout(**LAYOUTS[name][1])
    return build_tiny_engine(runtime, RECIPES[recipe], model=MODEL, parallel=layout, seed=seed)


def path_of(folder: Path, name: str, recipe: str) -> Path:
    return folder / name / recipe / f"step_{SAVED_STEP:08}"


def save_all(runtime: Runtime, names: list[str], folder: Path) -> dict[tuple[str, str], State]:
    found = {}
    for name in names:
        for recipe in RECIPES:
            engine = build(runtime, name, recipe, seed=0)
            train(engine, range(SAVED_STEP))
            engine.save(path_of(folder, name, recipe), {"tokens": 1})
            found[name, recipe] = look(engine)
    return found


def load_all(runtime: Runtime, pairs: list[tuple[str, str]], folder: Path) -> dict[tuple[str, str, str], State]:
    found = {}
    for source, target in pairs:
        for recipe in PAIRS[source, target]:
            engine = build(runtime, target, recipe, seed=7)
            assert engine.load(path_of(folder, source, recipe)) == {"tokens": 1}
            engine._position.seed = 0  # type: ignore[attr-defined]
            found[source, target, recipe] = look(engine)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@cache
def saved(folder: Path) -> dict[tuple[str, str], State]:
    """By layout and recipe, as the first rank sees it."""
    found = {}
    for world_size in sorted({size for size, _ in LAYOUTS.values()}):
        names = [name for name, (size, _) in LAYOUTS.items() if size == world_size]
        found |= run_on_ranks(save_all, world_size, names, folder, timeout_seconds=300)[0]
    return found


@cache
def loaded(folder: Path) -> list[dict[tuple[str, str, str], State]]:
    """By pair of layouts and recipe; one for each rank of those that hold all of them."""
    saved(folder)
    found: list[dict[tuple[str, str, str], State]] = [{}, {}]
    for world_size in sorted({size for size, _ in LAYOUTS.values()}):
        pairs = [pair for pair in PAIRS if LAYOUTS[pair[1]][0] == world_size]
        results = run_on_ranks(load_all, world_size, pairs, folder, timeout_seconds=300)
        found[0] |= results[0]
        found[1] |= results[-1]
    return found


@pytest.mark.distributed
@pytest.mark.parametrize(("source", "target", "recipe"), CASES)
def test_a_checkpoint_of_one_layout_goes_on_in_another(folder, source, target, recipe):
    before = saved(folder)[source, recipe]
    assert bool(before.histories) == (recipe == "fp8_delayed")
    for ranks in loaded(folder):
        after = ranks[source, target, recipe]
        for kind in ("parameters", "optimizer", "histories"):
            found, expected = getattr(after, kind), getattr(before, kind)
            assert found.keys() == expected.keys()
            assert [name for name in found if not torch.equal(found[name], expected[name])] == []
        # FP8 rounds a difference of FP32 rounding at times to another code.
        assert after.next_loss == pytest.approx(before.next_loss, rel=1e-6 if recipe == "fp32" else 2e-3)


@pytest.mark.distributed
@pytest.mark.parametrize("name", LAYOUTS)
def test_histories_do_not_depend_on_the_layout(folder, name):
    """An amax is that of the whole operand, and a step's is that of all its tokens."""
    found, expected = saved(folder)[name, "fp8_delayed"], saved(folder)["single", "fp8_delayed"]
    for key, history in found.histories.items():
        torch.testing.assert_close(history, expected.histories[key], rtol=0.1, atol=1e-6, msg=key)
