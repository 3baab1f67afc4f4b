"""Every model and every recipe of the YAML tree pass through the precision pass, on the meta device."""

import pytest

from nvfp4_train.config.tree import group_choices
from nvfp4_train.config.widths import quantized_linears
from nvfp4_train.engine.build import prepare_model
from tests.support.configs import composed

MODELS, RECIPES = group_choices()["model"], group_choices()["recipe"]


def check_fit(model: str, recipe: str) -> None:
    """Compare what the configuration says is quantized with what the pass quantizes."""
    cfg = composed(f"model={model}", f"recipe={recipe}")
    plan = prepare_model(cfg.model, cfg.recipe, seed=0).plan
    by_recipe = [row.module for row in plan.coverage if row.why.startswith("recipe ")]
    assert sorted(by_recipe) == sorted(quantized_linears(cfg.model, cfg.recipe.keep_bf16))
    assert {row.recipe for row in plan.coverage if row.module in by_recipe} == {cfg.recipe.name}


@pytest.mark.parametrize("model", MODELS)
def test_a_model_fits_the_recipe_of_the_paper(model):
    check_fit(model, "nvfp4")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_fits_the_demo(recipe):
    check_fit("demo", recipe)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_model_fits_every_recipe(model, recipe):
    check_fit(model, recipe)
