import pytest
import torch

from nvfp4_train.config.problem import ConfigError
from nvfp4_train.config.recipe import ComputeDtype, KeepBf16
from nvfp4_train.config.run import Device
from nvfp4_train.engine.build import build_engine, prepare_model
from nvfp4_train.parallel.mesh import build_mesh
from nvfp4_train.parallel.runtime import start_runtime, stop_runtime
from nvfp4_train.precision.linear import QuantizedLinear
from tests.support.recipes import cast_recipe, nvfp4_recipe
from tests.support.tiny import SEQUENCE_LENGTH, parallel_layout, tiny_model, tiny_optimizer, torch_engine


def test_preparing_allocates_nothing_and_says_what_each_linear_runs():
    prepared = prepare_model(tiny_model("M-*"), nvfp4_recipe(), seed=5)
    assert {parameter.device.type for parameter in prepared.model.parameters()} == {"meta"}
    assert {row.module for row in prepared.plan.coverage} == {
        name for name, module in prepared.model.named_modules() if isinstance(module, QuantizedLinear)
    }
    assert prepared.plan.position.seed == prepared.seed == 5
    assert prepared.model.compute_dtype is torch.bfloat16


def test_a_rule_of_the_recipe_that_matches_nothing_is_refused_before_anything_is_built():
    with pytest.raises(ConfigError, match=r"blocks\.9"):
        prepare_model(
            tiny_model(), nvfp4_recipe(keep=KeepBf16(first_blocks=0, last_blocks=0, modules=["blocks.9*"])), seed=0
        )


def test_masters_are_fp32_on_the_device_of_the_mesh_whatever_the_compute_dtype():
    mesh = build_mesh(parallel_layout(), start_runtime(Device.cpu))
    try:
        for dtype in ComputeDtype:
            prepared = prepare_model(tiny_model(), cast_recipe(dtype), seed=0)
            engine = build_engine(
                prepared,
                mesh=mesh,
                parallel_cfg=parallel_layout(),
                engine_cfg=torch_engine(),
                optimizer_cfg=tiny_optimizer(),
                sequence_length=SEQUENCE_LENGTH,
            )
            for name, parameter in engine.model.named_parameters():
                assert parameter.dtype is torch.float32, name
                assert parameter.to_local().device == mesh.device
                assert parameter.to_local().isfinite().all()
            assert engine.step == 0
            assert engine.mesh is mesh
    finally:
        stop_runtime()
