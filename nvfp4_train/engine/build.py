"""From configuration to an engine: build on meta, precision, parallelize, materialize."""

from dataclasses import dataclass, replace

import torch

from nvfp4_train.config.engine import EngineConfig, TorchEngineConfig, WeightGather
from nvfp4_train.config.model import ModelConfig
from nvfp4_train.config.optimizer import OptimizerConfig
from nvfp4_train.config.parallel import ParallelConfig
from nvfp4_train.config.recipe import RecipeConfig
from nvfp4_train.engine.base import Engine
from nvfp4_train.engine.torch_engine import TorchEngine
from nvfp4_train.model.hybrid import HybridLM, build_model
from nvfp4_train.optim.build import build_optimizer
from nvfp4_train.parallel.apply import parallelize
from nvfp4_train.parallel.materialize import materialize
from nvfp4_train.parallel.mesh import Mesh
from nvfp4_train.parallel.optimizer_sharding import dtensor_sharding
from nvfp4_train.parallel.quantized_gather import gather_quantized, weight_gathers
from nvfp4_train.precision.apply import apply_precision
from nvfp4_train.precision.coverage import PrecisionPlan


@dataclass(frozen=True, kw_only=True)
class PreparedModel:
    """A model that no rank has a part of yet.

    Args:
        model: On the meta device, after the precision pass.
        plan: Which Linear runs what, and the position that they share.
        seed: Of its initialization and its stochastic rounding.
    """

    model: HybridLM
    plan: PrecisionPlan
    seed: int


def prepare_model(model_cfg: ModelConfig, recipe_cfg: RecipeConfig, *, seed: int) -> PreparedModel:
    """Build a model on the meta device and run the precision pass; needs neither ranks nor memory.

    Raises:
        ValueError: for a module whose shape does not fit its recipe.
    """
    with torch.device("meta"):
        model = build_model(model_cfg)
    plan = apply_precision(model, recipe_cfg, seed=seed)
    return PreparedModel(model=model, plan=plan, seed=seed)


def build_engine(
    prepared: PreparedModel,
    *,
    mesh: Mesh,
    parallel_cfg: ParallelConfig,
    engine_cfg: EngineConfig,
    optimizer_cfg: OptimizerConfig,
) -> Engine:
    """Spread a prepared model over the mesh, give it its initial values, and make the engine that trains it."""
    match engine_cfg:
        case TorchEngineConfig():
            model = prepared.model
            parallelize(
                model,
                mesh=mesh,
                parallel_cfg=parallel_cfg,
                engine_cfg=engine_cfg,
                compute_dtype=model.compute_dtype,
            )
            materialize(model, mesh=mesh, seed=prepared.seed)
            if engine_cfg.weight_gather is WeightGather.quantized:
                _gather_quantized(prepared, mesh=mesh)
            return TorchEngine(
                model,
                optimizer=build_optimizer(model, optimizer_cfg, sharding=dtensor_sharding()),
                mesh=mesh,
                plan=prepared.plan,
                max_grad_norm=optimizer_cfg.clip_grad_norm,
                keeps_weights_gathered=not engine_cfg.reshard_after_forward,
            )
    raise AssertionError(f"no engine for {type(engine_cfg).__name__}")


def _gather_quantized(prepared: PreparedModel, *, mesh: Mesh) -> None:
    """Let FSDP send codes of weights, and say so in the coverage report."""
    gathers = weight_gathers(prepared.model, num_shards=mesh.fsdp_mesh.size(-1))
    gather_quantized(prepared.model, group=mesh.dense["fsdp"].get_group(), position=prepared.plan.position)
    prepared.plan.coverage[:] = [replace(row, weight_gather=gathers[row.module]) for row in prepared.plan.coverage]
