"""Engines. Each leaf class is one ``type`` of the ``engine`` group."""

from dataclasses import dataclass
from enum import StrEnum

from nvfp4_train.config.problem import Rule, check, not_negative


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
