"""Engines. Each leaf class is one ``type`` of the ``engine`` group."""

from dataclasses import dataclass
from enum import StrEnum

from nvfp4_train.config.problem import Rule, check, not_negative, positive

ZERO_STAGES = (1, 2, 3)
LAST_STAGE = 3  # the one that shards parameters too
# Options that only some stages read.
STAGE_3_OPTIONS = ("prefetch_bucket_size", "param_persistence_threshold")
OTHER_STAGES_OPTIONS = ("allgather_bucket_size",)
BUCKETS = ("reduce_bucket_size", "allgather_bucket_size", "prefetch_bucket_size")


class OffloadDevice(StrEnum):
    """Where a part of the training state lies while it is not used."""

    none = "none"  # on the rank's device
    cpu = "cpu"  # in the memory of the host


@dataclass(kw_only=True, slots=True)
class EngineConfig:
    """What every engine has: nothing; the leaf class chooses."""


class WeightGather(StrEnum):
    """What FSDP sends of the weights of quantized Linears."""

    bf16 = "bf16"
    quantized = "quantized"  # codes and scales, where shards end between tiles; needs weights with square tiles


@dataclass(kw_only=True, slots=True)
class TorchEngineConfig(EngineConfig):
    """PyTorch's own FSDP2.

    Args:
        reshard_after_forward: Whether gathered weights are freed between forward and backward.
        reshard_ranks: Where they are, the neighbouring ranks over which the weights stay spread until backward, such as
            the GPUs of a machine, so that they are gathered from near by; 0: all ranks of the shard.
        weight_gather: What ranks send each other of quantized weights.
    """

    reshard_after_forward: bool
    reshard_ranks: int
    weight_gather: WeightGather

    def __post_init__(self) -> None:
        check(
            self,
            *not_negative(self, "reshard_ranks"),
            Rule(
                "reshard_ranks",
                lambda: not self.reshard_ranks or self.reshard_after_forward,
                "says over how many ranks weights are resharded, and reshard_after_forward is false",
                "engine.reshard_after_forward=true, or engine.reshard_ranks=0",
            ),
            Rule(
                "reshard_ranks",
                lambda: not self.reshard_ranks or self.weight_gather is not WeightGather.quantized,
                "weights that are gathered quantized cannot stay spread over fewer ranks",
                "engine.reshard_ranks=0, or engine.weight_gather=bf16",
            ),
        )


@dataclass(kw_only=True, slots=True)
class DeepSpeedEngineConfig(EngineConfig):
    """DeepSpeed ZeRO over all ranks; sizes count elements, and null leaves DeepSpeed's own value.

    Args:
        zero_stage: What is sharded: 1 optimizer state, 2 gradients too, 3 parameters too.
        offload_optimizer: Where masters and optimizer state lie, and the update runs.
        offload_param: Where the parameters' shards lie; stage 3.
        overlap_comm: Whether gradients are reduced while the backward goes on.
        reduce_bucket_size: Gradients that are reduced together.
        allgather_bucket_size: Updated parameters that are gathered together; stages 1 and 2.
        prefetch_bucket_size: Parameters that are gathered ahead of their use; stage 3.
        param_persistence_threshold: Parameters with fewer elements stay gathered; stage 3.
    """

    zero_stage: int
    offload_optimizer: OffloadDevice
    offload_param: OffloadDevice
    overlap_comm: bool
    reduce_bucket_size: int | None
    allgather_bucket_size: int | None
    prefetch_bucket_size: int | None
    param_persistence_threshold: int | None

    def __post_init__(self) -> None:
        check(
            self,
            Rule("zero_stage", lambda: self.zero_stage in ZERO_STAGES, "must be 1, 2 or 3", "engine.zero_stage=1"),
            Rule(
                "offload_param",
                lambda: self.offload_param is OffloadDevice.none or self.zero_stage == LAST_STAGE,
                "parameters are sharded, and can be offloaded, with zero_stage 3 only",
                "use zero_stage: 3, or offload_param: none",
            ),
            Rule(
                "offload_param",
                lambda: self.offload_param is OffloadDevice.none or self.offload_optimizer is not OffloadDevice.none,
                "DeepSpeed offloads parameters together with the optimizer",
                "use offload_optimizer: cpu too, or offload_param: none",
            ),
            *(_only_with(self, name, stages=(LAST_STAGE,)) for name in STAGE_3_OPTIONS),
            *(_only_with(self, name, stages=(1, 2)) for name in OTHER_STAGES_OPTIONS),
            Rule(
                "allgather_bucket_size",
                lambda: self.allgather_bucket_size is None or self.allgather_bucket_size % 2 == 0,
                "DeepSpeed needs an even number",
                "add 1",
            ),
            *positive(self, *_given(self, BUCKETS)),
            *not_negative(self, *_given(self, ("param_persistence_threshold",))),
        )


def _given(cfg: DeepSpeedEngineConfig, names: tuple[str, ...]) -> list[str]:
    """Return those of the options that have a value."""
    return [name for name in names if getattr(cfg, name, None) is not None]


def _only_with(cfg: DeepSpeedEngineConfig, name: str, *, stages: tuple[int, ...]) -> Rule:
    wanted = " or ".join(map(str, stages))
    return Rule(
        name,
        lambda: getattr(cfg, name) is None or cfg.zero_stage in stages,
        f"DeepSpeed reads it with zero_stage {wanted} only",
        f"use null, or zero_stage: {stages[-1]}",
    )
