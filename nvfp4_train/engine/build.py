"""From configuration to an engine: build on meta, precision, parallelize, materialize."""

from dataclasses import dataclass

import torch

from nvfp4_train.config.engine import EngineConfig, TorchEngineConfig
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
from nvfp4_train.parallel.pipeline import PipelineRunner, RankParts, take_parts
from nvfp4_train.parallel.runner import Runner, WholeModelRunner
from nvfp4_train.parallel.stages import plan_stages
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
    sequence_length: int,
) -> Engine:
    """Spread a prepared model over the mesh, give it its initial values, and make the engine that trains it.

    Args:
        prepared: From `prepare_model`.
        mesh: Of all ranks.
        parallel_cfg: How the model is spread.
        engine_cfg: Which engine, and its choices.
        optimizer_cfg: Which optimizer.
        sequence_length: Tokens of a sequence, by which pipeline stages are balanced.
    """
    match engine_cfg:
        case TorchEngineConfig():
            plans = plan_stages(prepared.model, parallel_cfg, sequence_length=sequence_length)
            parts = take_parts(prepared.model, plans, rank=mesh.rank("pp")) if len(plans) > 1 else None
            model = prepared.model if parts is None else parts.model
            stages = [model] if parts is None else parts.stages
            for stage in stages:
                parallelize(
                    stage,
                    mesh=mesh,
                    parallel_cfg=parallel_cfg,
                    engine_cfg=engine_cfg,
                    compute_dtype=model.compute_dtype,
                )
            materialize(model, mesh=mesh, seed=prepared.seed, stages=stages)
            return TorchEngine(
                model,
                runner=build_runner(model, parts, mesh=mesh, parallel_cfg=parallel_cfg, engine_cfg=engine_cfg),
                optimizer=build_optimizer(model, optimizer_cfg),
                mesh=mesh,
                plan=prepared.plan,
                max_grad_norm=optimizer_cfg.clip_grad_norm,
            )
    raise AssertionError(f"no engine for {type(engine_cfg).__name__}")


def build_runner(
    model: HybridLM,
    parts: RankParts | None,
    *,
    mesh: Mesh,
    parallel_cfg: ParallelConfig,
    engine_cfg: TorchEngineConfig,
) -> Runner:
    """Make what runs forwards and backwards of a model that a rank has whole, or of its stages."""
    keeps_gathered = not engine_cfg.reshard_after_forward
    if parts is None:
        return WholeModelRunner(model, keeps_gathered=keeps_gathered)
    return PipelineRunner(parts, mesh=mesh, schedule=parallel_cfg.pipeline_schedule, keeps_gathered=keeps_gathered)
