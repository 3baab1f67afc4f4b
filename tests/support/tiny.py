"""Configurations and batches small enough for a test, complete enough to touch every kind of block."""

from dataclasses import asdict, replace
from typing import Any

import torch

from nvfp4_train.config.engine import DeepSpeedEngineConfig, OffloadDevice, TorchEngineConfig, WeightGather
from nvfp4_train.config.model import MambaConfig, ModelConfig, NormGroup
from nvfp4_train.config.optimizer import (
    AdamWConfig,
    MuonConfig,
    StateDtype,
    StateOffload,
    UpdateScale,
    WeightDecayShape,
)
from nvfp4_train.config.parallel import ActivationCheckpoint, Compile, ParallelConfig, ReduceDtype, StageBalance
from nvfp4_train.config.pipeline import PipelineSchedule
from nvfp4_train.data.batch import IGNORE_INDEX, Batch
from tests.support.models import TINY_ATTENTION, TINY_MLP, TINY_MOE, TINY_MTP

VOCAB_SIZE = 64
SEQUENCE_LENGTH = 32


def tiny_model(pattern: str = "M*-", *, tie_embeddings: bool = False) -> ModelConfig:
    """A hybrid of about 30 k parameters whose Linears all have dims that 16 divides; heads and groups are few but not
    one.
    """
    return ModelConfig(
        pattern=pattern,
        d_model=32,
        vocab_size=VOCAB_SIZE,
        norm_eps=1e-5,
        tie_embeddings=tie_embeddings,
        init_std=0.05,
        rescale_prenorm_residual=True,
        residual_fp32=False,
        mamba=MambaConfig(
            num_heads=16,  # two groups of 2 x 64 + 2 x 16 + 8 rows: in_proj has 336
            d_head=8,
            d_state=16,
            num_groups=2,
            d_conv=4,
            chunk_size=16,
            conv_bias=True,
            proj_bias=False,
            norm_group=NormGroup.group,
            dt_init_min=1e-3,
            dt_init_max=0.1,
            dt_init_floor=1e-4,
            dt_min=0.0,
            dt_max=float("inf"),
        ),
        attention=TINY_ATTENTION,
        mlp=TINY_MLP,
        moe=TINY_MOE,
        mtp=TINY_MTP,
    )


def parity_model() -> ModelConfig:
    """The hybrid with which layouts and engines are compared: every block, and a depth of prediction."""
    cfg = tiny_model("M*-E/*-")
    # Every width is whole blocks of 16 on each of two ranks.
    return replace(cfg, moe=replace(cfg.moe, num_experts=4, shared_d_ff=64))


def tiny_optimizer(**changes: Any) -> AdamWConfig:
    cfg = AdamWConfig(
        weight_decay=0.1,
        weight_decay_start=0.1,
        weight_decay_shape=WeightDecayShape.constant,
        clip_grad_norm=1.0,
        beta1=0.9,
        beta2=0.95,
        eps=1e-8,
        state_dtype=StateDtype.fp32,
        state_offload=StateOffload.none,
    )
    return replace(cfg, **changes)


def tiny_muon(**changes: Any) -> MuonConfig:
    """Muon beside the AdamW of `tiny_optimizer`, with products in FP32: what a test can compare."""
    cfg = MuonConfig(
        **asdict(tiny_optimizer()),
        momentum=0.95,
        newton_schulz_steps=5,
        orthogonalize_dtype=StateDtype.fp32,
        update_scale=UpdateScale.adamw_rms,
    )
    return replace(cfg, **changes)


def parallel_layout(
    *,
    replicate: int = 1,
    shard: int = -1,
    pp: int = 1,
    schedule: str = "1f1b",
    stages_per_rank: int = 1,
    stage_balance: StageBalance = StageBalance.flops,
    cp: int = 1,
    tp: int = 1,
    ep: int = 1,
    sequence_parallel: bool = True,
    tp_reduce_dtype: ReduceDtype = ReduceDtype.fp32,
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint.none,
    compile: Compile = Compile.none,
) -> ParallelConfig:
    return ParallelConfig(
        pp_degree=pp,
        pipeline_schedule=PipelineSchedule[schedule],
        stages_per_rank=stages_per_rank,
        stage_balance=stage_balance,
        dp_replicate_degree=replicate,
        dp_shard_degree=shard,
        cp_degree=cp,
        tp_degree=tp,
        ep_degree=ep,
        sequence_parallel=sequence_parallel,
        tp_reduce_dtype=tp_reduce_dtype,
        activation_checkpoint=activation_checkpoint,
        compile=compile,
    )


def torch_engine(
    *, reshard_after_forward: bool = True, reshard_ranks: int = 0, weight_gather: WeightGather = WeightGather.bf16
) -> TorchEngineConfig:
    return TorchEngineConfig(
        reshard_after_forward=reshard_after_forward, reshard_ranks=reshard_ranks, weight_gather=weight_gather
    )


def deepspeed_engine(stage: int, **changes: Any) -> DeepSpeedEngineConfig:
    """Sharded as far as the stage goes: no parameter of stage 3 is too small."""
    cfg = DeepSpeedEngineConfig(
        zero_stage=stage,
        offload_optimizer=OffloadDevice.none,
        offload_param=OffloadDevice.none,
        overlap_comm=False,
        reduce_bucket_size=None,
        allgather_bucket_size=None,
        prefetch_bucket_size=None,
        param_persistence_threshold=0 if stage == 3 else None,
    )
    return replace(cfg, **changes)


def tiny_batches(*, step: int, num_microbatches: int = 4, micro_batch_size: int = 1) -> list[Batch]:
    """All microbatches of a step, each with two documents in a row and some labels that do not count."""
    rng = torch.Generator().manual_seed(1000 + step)
    shape = (micro_batch_size, SEQUENCE_LENGTH)
    batches = []
    for index in range(num_microbatches):
        tokens = torch.randint(VOCAB_SIZE, (micro_batch_size, SEQUENCE_LENGTH + 1), generator=rng)
        boundary = int(torch.randint(4, SEQUENCE_LENGTH - 4, (), generator=rng))
        place = torch.arange(SEQUENCE_LENGTH).expand(shape)
        labels = tokens[:, 1:].clone()
        labels[:, boundary - 1] = IGNORE_INDEX
        batches.append(
            Batch(
                tokens=tokens[:, :-1].contiguous(),
                labels=labels,
                document_ids=(place >= boundary).to(torch.int32),
                position_ids=torch.where(place >= boundary, place - boundary, place),
                microbatch_index=index,
            )
        )
    return batches
