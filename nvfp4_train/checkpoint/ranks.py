"""What saving needs to know about ranks; a process without a process group is the only rank."""

from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def has_ranks() -> bool:
    """Return whether there is a process group."""
    return dist.is_initialized()


def is_first_rank() -> bool:
    """Return whether this rank does what only one may do."""
    return not dist.is_initialized() or dist.get_rank() == 0


def num_ranks() -> int:
    """Return the number of ranks."""
    return dist.get_world_size() if dist.is_initialized() else 1


def gather_from_ranks(value: T) -> list[T]:
    """Return the (picklable) values of all ranks, in order, on every rank."""
    if not dist.is_initialized():
        return [value]
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
