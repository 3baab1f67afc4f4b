"""Engines. Each leaf class is one ``type`` of the ``engine`` group."""

from dataclasses import dataclass

from nvfp4_train.config.problem import Rule, check


@dataclass(kw_only=True, slots=True)
class EngineConfig:
    """What every engine has: nothing; the leaf class chooses."""


@dataclass(kw_only=True, slots=True)
class TorchEngineConfig(EngineConfig):
    """PyTorch's own FSDP2.

    Args:
        reshard_after_forward: Whether gathered weights are freed between forward and backward.
        reshard_size: Neighbouring ranks that keep a copy together then, from which backward gathers; 0: all ranks do,
            as shards.
    """

    reshard_after_forward: bool
    reshard_size: int = 0

    def __post_init__(self) -> None:
        check(
            self,
            Rule(
                "reshard_size",
                lambda: self.reshard_size == 0 or self.reshard_size > 1,
                "must be 0 or at least 2; a copy that one rank keeps alone is reshard_after_forward: false",
                "use 0, or the number of ranks of a machine",
            ),
            Rule(
                "reshard_size",
                lambda: self.reshard_size == 0 or self.reshard_after_forward,
                "says how weights are freed after forward, which reshard_after_forward: false does not do",
                "use reshard_size: 0, or reshard_after_forward: true",
            ),
        )
