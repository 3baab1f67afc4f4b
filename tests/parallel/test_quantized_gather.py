"""Weights that travel as codes are bit for bit those that travel in BF16 and are quantized afterwards."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_train.config.engine import WeightGather
from nvfp4_train.config.recipe import RecipeConfig
from nvfp4_train.engine.base import Forward
from nvfp4_train.engine.build import build_engine, prepare_model
from nvfp4_train.engine.torch_engine import TorchEngine
from nvfp4_train.parallel.mesh import build_mesh
from nvfp4_train.parallel.quantized_gather import weight_gathers
from nvfp4_train.parallel.runtime import Runtime
from nvfp4_train.precision.linear import QuantizedLinear
from tests.support.configs import composed
from tests.support.engines import step_batches, train, whole_parameters
from tests.support.ranks import run_on_ranks
from tests.support.tiny import SEQUENCE_LENGTH, parallel_layout, tiny_model, tiny_optimizer, torch_engine

PATTERN = "M*-"


def recipe(name: str) -> RecipeConfig:
    cfg = composed(f"recipe={name}").recipe
    return replace(cfg, keep_bf16=replace(cfg.keep_bf16, first_blocks=0, last_blocks=1, modules=["lm_head"]))


def build(runtime: Runtime, name: str, gather: WeightGather, **layout: int) -> TorchEngine:
    parallel = parallel_layout(**layout)
    engine = build_engine(
        prepare_model(tiny_model(PATTERN), recipe(name), seed=0),
        mesh=build_mesh(parallel, runtime),
        parallel_cfg=parallel,
        engine_cfg=torch_engine(weight_gather=gather),
        optimizer_cfg=tiny_optimizer(),
        sequence_length=SEQUENCE_LENGTH,
    )
    assert isinstance(engine, TorchEngine)
    return engine


def run(engine: TorchEngine) -> dict[str, Any]:
    curve = train(engine, range(2))
    batch = step_batches(engine, 5)[0]
    losses = {forward: engine.evaluate(batch, forward=forward).loss_sum.item() for forward in Forward}
    curve += train(engine, [2])
    return {"curve": curve, "losses": losses, "parameters": whole_parameters(engine)}


def both_ways(
    runtime: Runtime, recipes: tuple[str, ...], layout: dict[str, int]
) -> dict[str, tuple[dict[str, Any], ...]]:
    return {name: tuple(run(build(runtime, name, gather, **layout)) for gather in WeightGather) for name in recipes}


def sizes(runtime: Runtime) -> dict[str, tuple[list[torch.dtype], int]]:
    """Of each quantized Linear, in forward: the dtypes that were gathered, and the bytes behind its parameter."""
    engine = build(runtime, "nvfp4", WeightGather.quantized)
    found = {}

    def look(name: str, linear: QuantizedLinear) -> None:
        arriving = linear._weights.arriving
        if arriving is not None:
            dtypes = [tensor.dtype for tensor in arriving.operand().tensors]
            found[name] = (dtypes, linear.weight.untyped_storage().nbytes())

    for name, module in engine.model.named_modules():
        if isinstance(module, QuantizedLinear):
            module.register_forward_pre_hook(lambda module, args, name=name: look(name, module))
    train(engine, [0])
    return found


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["curve"] == other["curve"]
    assert one["losses"] == other["losses"]
    for name, value in one["parameters"].items():
        assert torch.equal(value, other["parameters"][name]), name


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("ranks", "recipes", "layout"),
    [(2, ("nvfp4", "fp8"), {}), (4, ("nvfp4",), {"replicate": 2})],
    ids=["fsdp2", "hsdp"],
)
def test_training_and_evaluation_are_bitwise_those_of_weights_gathered_in_bf16(ranks, recipes, layout):
    for found in run_on_ranks(both_ways, ranks, recipes, layout):
        for one, other in found.values():
            assert_same(one, other)


def gathers_of(runtime: Runtime) -> dict[str, dict[str, str]]:
    return {
        name: {row.module: row.weight_gather for row in build_and_plan(runtime, name)} for name in ("nvfp4", "mxfp8")
    }


def build_and_plan(runtime: Runtime, name: str) -> list[Any]:
    parallel = parallel_layout()
    prepared = prepare_model(tiny_model(PATTERN), recipe(name), seed=0)
    build_engine(
        prepared,
        mesh=build_mesh(parallel, runtime),
        parallel_cfg=parallel,
        engine_cfg=torch_engine(weight_gather=WeightGather.quantized),
        optimizer_cfg=tiny_optimizer(),
        sequence_length=SEQUENCE_LENGTH,
    )
    return prepared.plan.coverage


@pytest.mark.distributed
def test_only_codes_travel_and_the_parameter_has_no_values():
    for found in run_on_ranks(sizes, 2):
        assert found.keys() >= {"blocks.1.mixer.o_proj", "blocks.1.mixer.qkv_proj"}
        for dtypes, num_bytes in found.values():
            assert dtypes == [torch.uint8, torch.uint8, torch.float32]
            assert num_bytes == 0


@pytest.mark.distributed
def test_the_coverage_report_says_what_travels_and_why():
    for found in run_on_ranks(gathers_of, 4):
        nvfp4 = found["nvfp4"]
        assert nvfp4["blocks.1.mixer.qkv_proj"] == "nvfp4"
        assert nvfp4["blocks.1.mixer.o_proj"] == "bf16: 32 rows are not a multiple of 16 x 4 shards"
        assert nvfp4["lm_head"] == "bf16: its weight is not quantized"
        assert found["mxfp8"]["blocks.1.mixer.qkv_proj"] == "bf16: fprop and dgrad quantize its weight in two ways"


def test_what_cannot_travel_quantized():
    prepared = prepare_model(tiny_model("E"), recipe("nvfp4"), seed=0)
    found = weight_gathers(prepared.model, num_shards=1)
    assert found["blocks.0.mixer.experts.up_proj"] == "bf16: experts are gathered together"


def whole(runtime: Runtime) -> tuple[Tensor, Tensor]:
    engine = build(runtime, "nvfp4", WeightGather.quantized)
    linear = engine.model.get_submodule("blocks.1.mixer.qkv_proj")
    return linear._weights.arriving.whole(), whole_parameters(engine)["blocks.1.mixer.qkv_proj.weight"]


@pytest.mark.distributed
def test_a_forward_without_rounding_gets_the_masters_in_bf16():
    for gathered, master in run_on_ranks(whole, 2):
        assert torch.equal(gathered, master.to(torch.bfloat16))
