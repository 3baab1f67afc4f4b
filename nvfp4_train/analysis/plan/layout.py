"""How ranks share a run: the degrees of the mesh and what a rank trades, as plain values."""

from dataclasses import dataclass, replace
from enum import StrEnum

from nvfp4_train.config.engine import DeepSpeedEngineConfig, OffloadDevice, TorchEngineConfig, WeightGather
from nvfp4_train.config.model import ModelConfig
from nvfp4_train.config.parallel import ActivationCheckpoint, Compile, ParallelConfig, ReduceDtype, StageBalance
from nvfp4_train.config.pattern import LayerKind
from nvfp4_train.config.pipeline import PipelineSchedule, microbatches_fault
from nvfp4_train.config.problem import Problem
from nvfp4_train.config.train import TrainConfig


class Schedule(StrEnum):
    """Order of the microbatches' forwards and backwards in a pipeline."""

    gpipe = "gpipe"
    one_f_one_b = "1f1b"
    interleaved = "interleaved"
    zero_bubble = "zero_bubble"
    zbv = "zbv"


@dataclass(frozen=True, kw_only=True)
class Zero:
    """DeepSpeed instead of the torch engine.

    Args:
        stage: 1, 2 or 3: what is sharded.
        offloads_optimizer: Whether masters and optimizer state lie in the host's memory.
        offloads_parameters: Whether the shards of parameters do, in stage 3.
        overlaps: Whether gradients are reduced while the backward goes on.
        reduce_bucket: Elements of gradients that are reduced together.
        prefetch_bucket: Elements of parameters that are gathered ahead of their use, in stage 3.
        persistent_below: Parameters of fewer elements stay gathered, in stage 3.
    """

    stage: int
    offloads_optimizer: bool
    offloads_parameters: bool
    overlaps: bool
    reduce_bucket: int
    prefetch_bucket: int
    persistent_below: int


# DeepSpeed's own values, for those that the configuration leaves to it.
# Source: https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/zero/config.py
REDUCE_BUCKET, PREFETCH_BUCKET, PERSISTENT_BELOW = 500_000_000, 50_000_000, 100_000
PARAMETERS_SHARDED = 3  # the stage that shards parameters too


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of the mesh axes, outermost first, and choices that change memory and speed.

    Args:
        pp: Pipeline ranks.
        dp_replicate: Copies of the sharded model.
        dp_shard: Ranks that share parameters and read different sequences.
        cp: Ranks that share a sequence.
        tp: Ranks that share every Linear.
        ep: Ranks that share the experts; divides dp_shard x cp.
        sequence_parallel: Whether what lies between the tensor-parallel Linears is divided over tp along the sequence.
        tp_sum: Dtype in which the ranks of tp add up their parts.
        schedule: Of the pipeline.
        num_virtual_stages: Stages of one pipeline rank.
        checkpoint: What is kept between forward and backward.
        reshards: Whether gathered weights are freed between forward and backward, and between microbatches.
        reshard_ranks: Neighbouring ranks over which weights then stay spread; 0: all that share them.
        gathers_codes: Whether weights of quantized Linears are gathered as codes and scales.
        zero: DeepSpeed's choices; None: the torch engine.
        micro_batch_size: Sequences of a forward.
        global_batch_size: Sequences of a step.
        sequence_length: Tokens of a sequence.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    sequence_parallel: bool = True
    tp_sum: ReduceDtype = ReduceDtype.bf16
    schedule: Schedule = Schedule.one_f_one_b
    num_virtual_stages: int = 1
    checkpoint: ActivationCheckpoint = ActivationCheckpoint.none
    reshards: bool = True
    reshard_ranks: int = 0
    gathers_codes: bool = False
    zero: Zero | None = None
    micro_batch_size: int
    global_batch_size: int
    sequence_length: int

    @property
    def devices(self) -> int:
        """Ranks of the mesh."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def dp(self) -> int:
        """Ranks that read different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Ranks over which a parameter is sharded, besides tp: those of a sequence share it too."""
        return self.dp_shard * self.cp

    @property
    def expert_fsdp(self) -> int:
        """The same for the experts, of which each ep rank has its own."""
        return self.fsdp // self.ep

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.pp * self.num_virtual_stages

    @property
    def tp_sum_bytes(self) -> int:
        """Bytes of a number that the ranks of tp add up."""
        return 4 if self.tp_sum is ReduceDtype.fp32 else 2

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a data rank in a step."""
        return self.global_batch_size // (self.micro_batch_size * self.dp)

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on one rank."""
        return self.micro_batch_size * self.sequence_length // self.cp

    def describe(self) -> str:
        """Return the degrees above 1 and the choices, in a line."""
        names = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
        parts = [f"{name} {getattr(self, name)}" for name in names if getattr(self, name) > 1] or ["one rank"]
        if self.pp > 1:
            parts.append(f"{self.schedule.value} x {self.num_virtual_stages}")
        parts.append(f"micro-batch {self.micro_batch_size}")
        parts.append(f"checkpoint {self.checkpoint.value}")
        if self.zero is None:
            parts.append("reshard" if self.reshards else "keep gathered")
        else:
            offloads = ["optimizer"] * self.zero.offloads_optimizer + ["parameters"] * self.zero.offloads_parameters
            parts.append(" ".join([f"ZeRO {self.zero.stage}", *(f"{what} offloaded" for what in offloads)]))
        return ", ".join(parts)


def layout_of(cfg: TrainConfig) -> Layout:
    """Read the layout of a configuration; ``dp_shard`` is 0 where the configuration says -1, all that are left."""
    parallel, engine = cfg.parallel, cfg.engine
    layout = Layout(
        pp=parallel.pp_degree,
        dp_replicate=parallel.dp_replicate_degree,
        dp_shard=max(parallel.dp_shard_degree, 0),
        cp=parallel.cp_degree,
        tp=parallel.tp_degree,
        ep=parallel.ep_degree,
        sequence_parallel=parallel.sequence_parallel,
        tp_sum=parallel.tp_reduce_dtype,
        schedule=Schedule(parallel.pipeline_schedule.value),
        num_virtual_stages=parallel.stages_per_rank,
        checkpoint=parallel.activation_checkpoint,
        micro_batch_size=cfg.batch.micro_batch_size,
        global_batch_size=cfg.batch.global_batch_size,
        sequence_length=cfg.batch.sequence_length,
    )
    if isinstance(engine, DeepSpeedEngineConfig):
        return replace(layout, zero=_zero_of(engine), reshards=engine.zero_stage == PARAMETERS_SHARDED)
    assert isinstance(engine, TorchEngineConfig)
    return replace(
        layout,
        reshards=engine.reshard_after_forward,
        reshard_ranks=engine.reshard_ranks,
        gathers_codes=engine.weight_gather is WeightGather.quantized,
    )


def _zero_of(engine: DeepSpeedEngineConfig) -> Zero:
    def given(value: int | None, otherwise: int) -> int:
        return otherwise if value is None else value

    return Zero(
        stage=engine.zero_stage,
        offloads_optimizer=engine.offload_optimizer is not OffloadDevice.none,
        offloads_parameters=engine.offload_param is not OffloadDevice.none,
        overlaps=engine.overlap_comm,
        reduce_bucket=given(engine.reduce_bucket_size, REDUCE_BUCKET),
        prefetch_bucket=given(engine.prefetch_bucket_size, PREFETCH_BUCKET),
        persistent_below=given(engine.param_persistence_threshold, PERSISTENT_BELOW),
    )


def parallel_of(layout: Layout) -> ParallelConfig:
    """Return what the configuration says of a layout; nothing is compiled."""
    return ParallelConfig(
        pp_degree=layout.pp,
        pipeline_schedule=PipelineSchedule(layout.schedule.value if layout.pp > 1 else "1f1b"),
        stages_per_rank=layout.num_virtual_stages,
        stage_balance=StageBalance.flops,  # a plan measures nothing
        dp_replicate_degree=layout.dp_replicate,
        dp_shard_degree=layout.dp_shard,
        cp_degree=layout.cp,
        tp_degree=layout.tp,
        ep_degree=layout.ep,
        sequence_parallel=layout.sequence_parallel,
        tp_reduce_dtype=layout.tp_sum,
        activation_checkpoint=layout.checkpoint,
        compile=Compile.none,
    )


def filled(layout: Layout, *, devices: int) -> Layout:
    """Return the layout with ``dp_shard`` grown until it fills ``devices``; unchanged where that is not possible."""
    others = replace(layout, dp_shard=max(layout.dp_shard, 1)).devices
    return layout if devices % others else replace(layout, dp_shard=max(layout.dp_shard, 1) * devices // others)


def layout_problems(layout: Layout, model: ModelConfig, *, devices: int) -> list[Problem]:
    """Return why a model cannot run in a layout on so many devices; empty if it can, as far as shapes tell."""
    if layout.devices != devices:
        others = replace(layout, dp_shard=max(layout.dp_shard, 1)).devices
        rule = f"must be a multiple of the product of the degrees, {others}, which dp_shard then fills up"
        return [Problem(key="--devices", value=devices, rule=rule, fix="change --devices or the degrees of parallel")]
    unit = layout.micro_batch_size * layout.dp
    problems = [
        *_divides("batch.global_batch_size", layout.global_batch_size, unit, "micro_batch_size times the data ranks"),
        *_divides("batch.sequence_length", layout.sequence_length, layout.cp, "cp"),
        *_divides("dp_shard x cp", layout.fsdp, layout.ep, "ep"),
        *_divides("dp_shard x cp", layout.fsdp, layout.reshard_ranks or 1, "engine.reshard_ranks"),
        *model_problems(layout, model),
    ]
    return problems if problems else _pipeline_problems(layout, model)


def _divides(key: str, number: int, divisor: int, meaning: str) -> list[Problem]:
    if number % divisor == 0:
        return []
    rule = f"must be a multiple of {divisor} ({meaning})"
    return [Problem(key=key, value=number, rule=rule, fix="change one of the two")]


def model_problems(layout: Layout, model: ModelConfig) -> list[Problem]:
    """Return which widths and lengths of a model tp, cp and ep do not divide."""
    kinds = {*model.layer_kinds, *model.layer_pattern.mtp}
    tp, per_rank = layout.tp, layout.sequence_length // layout.cp
    problems = _divides("model.vocab_size", model.vocab_size, tp, "tp")
    if layout.sequence_parallel:
        problems += _divides("batch.sequence_length / cp", per_rank, tp, "tp, sequence parallel")
    if LayerKind.attention in kinds:
        problems += _divides("model.attention.num_kv_heads", model.attention.num_kv_heads, tp, "tp")
    if LayerKind.mamba in kinds:
        problems += _divides("model.mamba.num_groups", model.mamba.num_groups, tp, "tp")
    if LayerKind.mlp in kinds:
        problems += _divides("model.mlp.d_ff", model.mlp.d_ff, tp, "tp")
    if LayerKind.moe in kinds:
        problems += _divides("model.moe.num_experts", model.moe.num_experts, layout.ep, "ep")
        problems += _divides("model.moe.d_ff", model.moe.d_ff, tp, "tp")
        problems += _divides("model.moe.shared_d_ff", model.moe.shared_d_ff, tp, "tp")
        problems += _divides("model.moe.d_latent", model.moe.d_latent, tp, "tp")
    elif layout.ep > 1:
        rule = "must be 1: the model has no experts"
        problems.append(Problem(key="ep", value=layout.ep, rule=rule, fix="use 1"))
    return problems


def _pipeline_problems(layout: Layout, model: ModelConfig) -> list[Problem]:
    if layout.num_stages == 1:
        return []
    problems = []
    blocks, segments = len(model.layer_kinds), len(model.layer_pattern.segments)
    if layout.num_stages > blocks:
        rule = f"makes {layout.num_stages} stages, and the model has {blocks} blocks: one would be empty"
        problems.append(Problem(key="pp", value=layout.pp, rule=rule, fix="lower it"))
    if segments not in (1, layout.num_stages):
        rule = f"has {segments} segments, and the pipeline {layout.num_stages} stages"
        fix = "use as many segments as stages, or no | at all"
        problems.append(Problem(key="model.pattern", value=model.pattern, rule=rule, fix=fix))
    fault = microbatches_fault(
        PipelineSchedule(layout.schedule.value), pp_degree=layout.pp, num_microbatches=layout.num_microbatches
    )
    if fault:
        fix = "use smaller microbatches, fewer data ranks, fewer pipeline ranks or another schedule"
        problems.append(Problem(key="microbatches", value=layout.num_microbatches, rule=fault, fix=fix))
    return problems
