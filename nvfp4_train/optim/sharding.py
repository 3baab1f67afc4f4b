"""What an optimizer needs to know about parameters of which this process holds a part."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _zeros_like(tensor: Tensor, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros_like(tensor, dtype=dtype, device=device)


def _map(tensors: list[Tensor], functions: Sequence[Callable[[Tensor], Tensor]]) -> list[Tensor]:
    return [function(tensor) for tensor, function in zip(tensors, functions, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Access to parameters and to tensors in their layout; the defaults are those of whole tensors.

    Args:
        local: Returns the part of a tensor that this process holds, sharing its memory.
        zeros_like: Makes zeros in the layout of a tensor, in another dtype, on another device.
        map_whole: Given tensors and as many functions from a whole matrix [..., M, N] to one of its shape, returns this
            process's part of each result. The last two dims of a tensor are its matrix; functions treat what is before
            them one by one. All processes that share a tensor call it with the same tensors in the same order.
    """

    local: Callable[[Tensor], Tensor] = _itself
    zeros_like: Callable[..., Tensor] = _zeros_like
    map_whole: Callable[[list[Tensor], Sequence[Callable[[Tensor], Tensor]]], list[Tensor]] = _map
