"""The precision pass on a whole model."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from nvfp4_train.config.problem import ConfigError
from nvfp4_train.config.recipe import ComputeDtype, KeepBf16
from nvfp4_train.model.hybrid import build_model
from nvfp4_train.model.init import init_parameters
from nvfp4_train.numerics.spec import Format, GemmMode
from nvfp4_train.precision.apply import apply_precision, compute_dtype_recipe
from nvfp4_train.precision.linear import QuantizedLinear
from tests.support.blocks import TinyBlocks
from tests.support.recipes import cast_recipe, cast_table, nvfp4_recipe
from tests.support.tiny import tiny_batches, tiny_model

KEEP = KeepBf16(first_blocks=0, last_blocks=1, modules=["lm_head"])


def test_every_linear_is_swapped_and_names_parameters_and_dtypes_stay():
    model = TinyBlocks()
    before = dict(model.named_parameters())
    plan = apply_precision(model, nvfp4_recipe(keep=KEEP), seed=5)
    after = dict(model.named_parameters())
    assert list(before) == list(after)
    assert all(before[name] is after[name] for name in before)
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert len(linears) == len(plan.coverage) == 7
    assert all(isinstance(linear, QuantizedLinear) for linear in linears)
    assert {id(linear.position) for linear in linears} == {id(plan.position)}
    assert plan.position.seed == 5
    assert model.compute_dtype is torch.bfloat16


def test_it_works_on_the_meta_device():
    with torch.device("meta"):
        model = TinyBlocks()
    apply_precision(model, nvfp4_recipe(keep=KEEP), seed=0)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert sum(isinstance(module, QuantizedLinear) for module in model.modules()) == 7


def test_kept_linears_run_the_table_of_the_compute_dtype():
    model = TinyBlocks()
    recipe = nvfp4_recipe(keep=KEEP)
    plan = apply_precision(model, recipe, seed=0)
    tables = {row.module: model.get_submodule(row.module).precision.recipe for row in plan.coverage}
    assert tables["blocks.0.up_proj"] == tables["blocks.1.down_proj"] == recipe.linear
    assert tables["blocks.2.up_proj"] == tables["lm_head"] == cast_table(Format.bf16)
    assert [row.recipe for row in plan.coverage] == ["nvfp4"] * 4 + ["bf16"] * 3


def test_a_kept_linear_of_the_fp32_recipe_stays_in_fp32():
    model = TinyBlocks()
    plan = apply_precision(model, replace(cast_recipe(ComputeDtype.fp32), keep_bf16=KEEP), seed=0)
    assert {row.recipe for row in plan.coverage} == {"fp32"}
    assert model.lm_head.precision.recipe == compute_dtype_recipe(ComputeDtype.fp32) == cast_table(Format.fp32)
    assert model.compute_dtype is torch.float32


def test_layers_draw_from_streams_of_their_own():
    model = TinyBlocks()
    apply_precision(model, nvfp4_recipe(), seed=0)
    names = {module.precision.layer for module in model.modules() if isinstance(module, QuantizedLinear)}
    assert names == {name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


def test_a_tied_weight_stays_tied():
    model = TinyBlocks()
    model.lm_head.weight = model.embedding.weight
    apply_precision(model, nvfp4_recipe(), seed=0)
    assert model.lm_head.weight is model.embedding.weight


def test_all_shapes_that_do_not_fit_and_all_rules_that_match_nothing_are_reported_together():
    model = TinyBlocks(d_ff=40, num_outputs=50)
    keep = KeepBf16(first_blocks=1, last_blocks=9, modules=["lm_haed"])
    with pytest.raises(ConfigError) as error:
        apply_precision(model, nvfp4_recipe(keep=replace(keep, last_blocks=0)), seed=0)
    assert [(problem.key, problem.value) for problem in error.value.problems] == [
        ("recipe.keep_bf16.modules", "lm_haed"),
        ("blocks.1.up_proj.out_features", 40),
        ("blocks.1.down_proj.in_features", 40),
        ("blocks.2.up_proj.out_features", 40),
        ("blocks.2.down_proj.in_features", 40),
        ("lm_head.out_features", 50),
    ]
    assert "multiple of 16" in error.value.problems[1].rule
    assert "blocks.1.up_proj" in error.value.problems[1].fix
    assert not any(isinstance(module, QuantizedLinear) for module in model.modules())
    with pytest.raises(ConfigError, match=r"recipe\.keep_bf16\.last_blocks = 9"):
        apply_precision(model, nvfp4_recipe(keep=keep), seed=0)


def test_shapes_do_not_matter_to_kept_linears_and_cast_recipes():
    apply_precision(TinyBlocks(num_outputs=50), nvfp4_recipe(keep=KEEP), seed=0)
    apply_precision(TinyBlocks(d_ff=40, num_outputs=50), cast_recipe(ComputeDtype.bf16), seed=0)


def test_bf16_products_are_refused_for_fp32_operands():
    cfg = replace(cast_recipe(ComputeDtype.fp32), gemm=GemmMode.bf16_exact)
    with pytest.raises(ConfigError, match=r"recipe\.gemm"):
        apply_precision(TinyBlocks(), cfg, seed=0)


def test_a_model_learns_under_the_recipe():
    model = TinyBlocks()
    plan = apply_precision(model, nvfp4_recipe(keep=KEEP), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = torch.randint(0, 48, (4, 16), generator=torch.Generator().manual_seed(1))
    losses = []
    for step in range(60):
        plan.position.start_microbatch(step=step, row_offset=0)
        loss = nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), (tokens + 1).flatten() % 48)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        plan.position.weights_changed()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


def test_the_hybrid_model_runs_with_its_linears_in_the_order_of_their_names():
    cfg = tiny_model("M-*-")
    model = build_model(cfg)
    init_parameters(model, cfg, seed=0)
    plan = apply_precision(model, nvfp4_recipe(keep=KEEP), seed=0)
    order: list[str] = []
    for row in plan.coverage:
        model.get_submodule(row.module).register_forward_hook(lambda *_, name=row.module: order.append(name))
    [batch] = tiny_batches(step=0, num_microbatches=1)
    loss = model(batch.tokens, document_ids=batch.document_ids, labels=batch.labels)
    loss.backward()
    assert order == [row.module for row in plan.coverage]  # recorded_amax relies on it
    assert order[0] == "blocks.0.mixer.in_proj"
    assert order[-1] == "lm_head"
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert all(parameter.grad.dtype is torch.float32 for parameter in model.parameters())
