"""From configuration to an engine: build on meta, precision, parallelize, materialize."""

from dataclasses import dataclass, replace

import torch
from torch import nn

from nvfp4_train.config.engine import DeepSpeedEngineConfig, EngineConfig, TorchEngineConfig, WeightGather
from nvfp4_train.config.model import ModelConfig
from nvfp4_train.config.optimizer import AdamWConfig, OptimizerConfig
from nvfp4_train.config.parallel import ParallelConfig, StageBalance
from nvfp4_train.config.recipe import RecipeConfig
from nvfp4_train.engine.base import Engine
from nvfp4_train.engine.deepspeed_engine import DeepSpeedEngine
from nvfp4_train.engine.torch_engine import TorchEngine
from nvfp4_train.model.hybrid import HybridLM, build_model
from nvfp4_train.optim.build import build_optimizer, build_stateless
from nvfp4_train.parallel.activation import checkpoint_activations
from nvfp4_train.parallel.apply import parallelize
from nvfp4_train.parallel.block_timing import shared_block_times
from nvfp4_train.parallel.materialize import materialize
from nvfp4_train.parallel.mesh import Mesh
from nvfp4_train.parallel.optimizer_sharding import dtensor_sharding
from nvfp4_train.parallel.pipeline import PipelineRunner, RankParts, take_parts
from nvfp4_train.parallel.quantized_gather import gather_quantized, weight_gathers
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
        num_parameters: Of the whole model, which an engine may leave to no rank.
    """

    model: HybridLM
    plan: PrecisionPlan
    seed: int
    num_parameters: int


def prepare_model(model_cfg: ModelConfig, recipe_cfg: RecipeConfig, *, seed: int) -> PreparedModel:
    """Build a model on the meta device and run the precision pass; needs neither ranks nor memory.

    Raises:
        ValueError: for a module whose shape does not fit its recipe.
    """
    with torch.device("meta"):
        model = build_model(model_cfg)
    plan = apply_precision(model, recipe_cfg, seed=seed)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return PreparedModel(model=model, plan=plan, seed=seed, num_parameters=num_parameters)


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
            parts = _divide(prepared.model, mesh=mesh, parallel_cfg=parallel_cfg, sequence_length=sequence_length)
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
            if engine_cfg.weight_gather is WeightGather.quantized:
                _gather_quantized(prepared, model, mesh=mesh)
            return TorchEngine(
                model,
                runner=build_runner(model, parts, mesh=mesh, parallel_cfg=parallel_cfg, engine_cfg=engine_cfg),
                optimizer=build_optimizer(model, optimizer_cfg, sharding=dtensor_sharding()),
                mesh=mesh,
                plan=prepared.plan,
                max_grad_norm=optimizer_cfg.clip_grad_norm,
            )
        case DeepSpeedEngineConfig():
            model = prepared.model
            assert isinstance(optimizer_cfg, AdamWConfig)
            checkpoint_activations(model, parallel_cfg.activation_checkpoint)
            materialize(model, mesh=mesh, seed=prepared.seed)
            return DeepSpeedEngine(
                model,
                optimizer=build_stateless(model, optimizer_cfg),
                mesh=mesh,
                plan=prepared.plan,
                cfg=engine_cfg,
                max_grad_norm=optimizer_cfg.clip_grad_norm,
            )
    raise AssertionError(f"no engine for {type(engine_cfg).__name__}")


def _divide(model: HybridLM, *, mesh: Mesh, parallel_cfg: ParallelConfig, sequence_length: int) -> RankParts | None:
    """Return this rank's stages of a pipeline, or None where it has the whole model."""
    costs = None
    if parallel_cfg.stage_balance is StageBalance.time:
        costs = shared_block_times(model, sequence_length=sequence_length, mesh=mesh)
    plans = plan_stages(model, parallel_cfg, sequence_length=sequence_length, costs=costs)
    return take_parts(model, plans, rank=mesh.rank("pp")) if len(plans) > 1 else None


def _gather_quantized(prepared: PreparedModel, model: nn.Module, *, mesh: Mesh) -> None:
    """Let FSDP send codes of weights, and say so in the coverage report."""
    gathers = weight_gathers(model, num_shards=mesh.fsdp_mesh.size(-1))
    gather_quantized(model, group=mesh.dense["fsdp"].get_group(), position=prepared.plan.position)
    prepared.plan.coverage[:] = [replace(row, weight_gather=gathers[row.module]) for row in prepared.plan.coverage]


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
    return PipelineRunner(
        parts,
        mesh=mesh,
        schedule=parallel_cfg.pipeline_schedule,
        keeps_gathered=keeps_gathered,
        sequence_shards=mesh.degree("tp") if parallel_cfg.sequence_parallel else 1,
    )
