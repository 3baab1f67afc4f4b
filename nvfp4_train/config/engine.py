"""Engines. Each leaf class is one ``type`` of the ``engine`` group."""

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class EngineConfig:
    """What every engine has: nothing; the leaf class chooses."""


@dataclass(kw_only=True, slots=True)
class TorchEngineConfig(EngineConfig):
    """PyTorch's own FSDP2.

    Args:
        reshard_after_forward: Whether gathered weights are freed between forward and backward.
    """

    reshard_after_forward: bool
