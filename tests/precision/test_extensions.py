"""Extensions of a recipe: found, checked before anything runs, recorded, and called after the optimizer."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from nvfp4_train.config.problem import ConfigError
from nvfp4_train.config.recipe import RecipeConfig
from nvfp4_train.precision.apply import apply_precision
from nvfp4_train.precision.coverage import coverage_report, format_coverage
from nvfp4_train.precision.extensions import after_step, extension_problems, list_extensions
from tests.support import outside
from tests.support.recipes import nvfp4_recipe, nvfp4_table

HERE = "tests.support.outside"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(32, 32, bias=False)])


def recipe_with(
    *, quantizer: str | None = None, gemm: str | None = None, pair: str | None = None, **root
) -> RecipeConfig:
    table = nvfp4_table()
    x = replace(table.fprop.x, quantizer=quantizer, args={"times": 1.0} if quantizer else None)
    linear = replace(table, fprop=replace(table.fprop, x=x, gemm=gemm), pair=pair)
    return replace(nvfp4_recipe(linear), **root)


def test_every_kind_is_found_with_its_key():
    cfg = recipe_with(
        quantizer=f"{HERE}:doubled", gemm=f"{HERE}:fprop_row", pair=f"{HERE}:Pair", after_optimizer=f"{HERE}:halve"
    )
    found = list_extensions(cfg)
    assert [(extension.key, extension.path.partition(":")[2]) for extension in found] == [
        ("recipe.linear.fprop.x.quantizer", "doubled"),
        ("recipe.linear.fprop.gemm", "fprop_row"),
        ("recipe.linear.pair", "Pair"),
        ("recipe.after_optimizer", "halve"),
    ]
    assert found[0].args == {"times": 1.0}
    assert extension_problems(found) == []
    assert list_extensions(nvfp4_recipe()) == []


def test_all_that_cannot_be_called_are_reported_at_once():
    cfg = recipe_with(
        quantizer=f"{HERE}:halve",
        gemm="not_there:row",
        pair=f"{HERE}:doubled",
        after_optimizer=f"{HERE}:NOT_A_FUNCTION",
    )
    with pytest.raises(ConfigError) as caught:
        apply_precision(Model(), cfg, seed=0)
    rules = {problem.key: problem.rule for problem in caught.value.problems}
    assert "too many positional arguments" in rules["recipe.linear.fprop.x.quantizer"]
    assert "No module named 'not_there'" in rules["recipe.linear.fprop.gemm"]
    assert "is a NoneType, not a function" in rules["recipe.linear.pair"]
    assert "is a int, not a function" in rules["recipe.after_optimizer"]


def test_path_arguments_and_hash_are_in_the_coverage_report():
    plan = apply_precision(Model(), recipe_with(quantizer=f"{HERE}:doubled"), seed=0)
    (record,) = coverage_report(plan)["extensions"]
    digest = hashlib.sha256(Path(outside.__file__).read_bytes()).hexdigest()
    assert record == {
        "key": "recipe.linear.fprop.x.quantizer",
        "args": {"times": 1.0},
        "path": f"{HERE}:doubled",
        "file": outside.__file__,
        "sha256": digest,
    }
    assert f"recipe.linear.fprop.x.quantizer is {HERE}:doubled" in format_coverage(plan)
    assert digest[:12] in format_coverage(plan)


def test_the_function_after_the_optimizer_gets_the_model_the_step_and_its_arguments():
    model = Model()
    before = model.blocks[0].weight.detach().clone()
    cfg = recipe_with(after_optimizer=f"{HERE}:halve", after_optimizer_args={"after": 1})
    after_step(cfg, model, step=1)
    assert torch.equal(model.blocks[0].weight, before)
    after_step(cfg, model, step=2)
    assert torch.equal(model.blocks[0].weight, before / 2)
    assert apply_precision(Model(), nvfp4_recipe(), seed=0).after_step is None
