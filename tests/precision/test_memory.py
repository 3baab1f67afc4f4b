"""Bytes kept for backward, as the metrics report them."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from nvfp4_train.config.recipe import ComputeDtype, RecipeConfig
from nvfp4_train.precision.apply import apply_precision
from nvfp4_train.precision.memory import saved_bytes
from tests.support.recipes import cast_recipe, nvfp4_recipe, nvfp4_table

TOKENS, WIDTH = 64, 128


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def measured(cfg: RecipeConfig) -> int:
    model = Model()
    apply_precision(model, cfg, seed=0)
    model(torch.ones(TOKENS, WIDTH, dtype=torch.bfloat16)).sum().backward()
    return saved_bytes(model)


@pytest.mark.parametrize(
    ("cfg", "expected"),
    [
        (cast_recipe(ComputeDtype.bf16), 2 * TOKENS * WIDTH),
        (nvfp4_recipe(), TOKENS * WIDTH * 9 // 16 + 4),
        # the pair keeps x, and a BF16 copy of the weight, which is not the parameter
        (nvfp4_recipe(replace(nvfp4_table(), pair="tests.support.outside:Pair")), 2 * TOKENS * WIDTH + 2 * WIDTH**2),
    ],
)
def test_inputs_are_counted_and_parameters_are_not(cfg: RecipeConfig, expected: int):
    assert measured(cfg) == 2 * expected  # two Linears


def test_nvfp4_keeps_at_most_three_tenths_of_bf16():
    assert measured(nvfp4_recipe()) <= 0.30 * measured(cast_recipe(ComputeDtype.bf16))


def test_an_evaluation_changes_nothing():
    model = Model()
    apply_precision(model, nvfp4_recipe(), seed=0)
    x = torch.ones(TOKENS, WIDTH, dtype=torch.bfloat16)
    model(x).sum().backward()
    before = saved_bytes(model)
    with torch.no_grad():
        model(torch.cat([x, x]))
    assert saved_bytes(model) == before > 0


def test_a_model_without_linears_keeps_nothing():
    assert saved_bytes(nn.Identity()) == 0
