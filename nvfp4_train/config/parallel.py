"""How a run is spread over ranks."""

from dataclasses import dataclass

from nvfp4_train.config.problem import Rule, check, positive


@dataclass(kw_only=True, slots=True)
class ParallelConfig:
    """Degrees of the mesh axes; their product is the number of ranks.

    Args:
        dp_replicate_degree: Copies of the (sharded) model.
        dp_shard_degree: Ranks over which parameters, gradients and optimizer state are sharded (FSDP2); -1 takes what
            is left.
    """

    dp_replicate_degree: int
    dp_shard_degree: int

    def __post_init__(self) -> None:
        check(
            self,
            *positive(self, "dp_replicate_degree"),
            Rule(
                "dp_shard_degree",
                lambda: self.dp_shard_degree == -1 or self.dp_shard_degree >= 1,
                "must be -1 or at least 1",
                "use -1 to take the ranks that are left",
            ),
        )
