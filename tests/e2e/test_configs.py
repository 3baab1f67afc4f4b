"""Every model of the YAML tree passes through the precision pass of every recipe, on the meta device."""

import pytest

from nvfp4_train.config.tree import group_choices
from nvfp4_train.config.widths import quantized_linears
from nvfp4_train.engine.build import prepare_model
from tests.support.configs import composed


@pytest.mark.parametrize("model", group_choices()["model"])
@pytest.mark.parametrize("recipe", group_choices()["recipe"])
def test_a_model_and_a_recipe_fit(model, recipe):
    cfg = composed(f"model={model}", f"recipe={recipe}")
    plan = prepare_model(cfg.model, cfg.recipe, seed=0).plan
    by_recipe = [row.module for row in plan.coverage if row.why.startswith("recipe ")]
    assert sorted(by_recipe) == sorted(quantized_linears(cfg.model, cfg.recipe.keep_bf16))
    assert {row.recipe for row in plan.coverage if row.module in by_recipe} == {cfg.recipe.name}
