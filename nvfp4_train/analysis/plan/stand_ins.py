"""What stands in for other ranks where one block runs alone: tensors of the shapes that they would send."""

from functools import partial

import torch
from torch import Tensor, nn

from nvfp4_train.model.documents import Documents, locate_documents, take_part
from nvfp4_train.model.moe import Experts, RoutedTokens
from nvfp4_train.model.row_part import RowExchange
from nvfp4_train.precision.experts import QuantizedExperts


def part_of_rows(document_ids: Tensor, position_ids: Tensor | None = None, *, cp: int) -> Documents:
    """Return the documents of the last of ``cp`` parts of every row [B, S], whose queries see all keys."""
    whole = locate_documents(document_ids, position_ids)
    if cp == 1:
        return whole
    size = document_ids.shape[1] // cp
    exchange = RowExchange(
        num_parts=cp,
        gather=lambda part, dim: torch.cat([part] * cp, dim=dim),
        with_preceding=lambda part, dim, count: torch.cat((part.narrow(dim, size - count, count), part), dim=dim),
        preceding=lambda x, count: x[:, -count:].clone(),
        following=lambda x, count: x[:, :count].clone(),
        carry_forward=_entering,
        carry_backward=_entering,
        sum=lambda tensor: tensor,
    )
    return take_part(whole, first=(cp - 1) * size, size=size, exchange=exchange)


def _entering(value: Tensor, factor: Tensor) -> Tensor:
    del factor  # what enters has the shape of what is passed on
    return torch.zeros_like(value)


def as_expert_rank(model: nn.Module, *, ep: int) -> None:
    """Let the experts of a model be those of one of ``ep`` ranks, with as many tokens from the others as it sends."""
    for module in model.modules():
        if isinstance(module, Experts):
            module.exchange = partial(_exchange, ep=ep)
        elif isinstance(module, QuantizedExperts):
            module.num_experts //= ep
            module.weight = nn.Parameter(module.weight[: module.num_experts].detach())


def _exchange(tokens: Tensor, ends: Tensor, *, ep: int) -> RoutedTokens:
    """Give each expert the tokens of ``ep`` neighbouring ones; as real ranks do, keep two orders of all tokens."""
    arrived, order = (torch.arange(len(tokens), device=tokens.device) for _ in range(2))
    return RoutedTokens(
        tokens=tokens[arrived], ends=ends.view(-1, ep)[:, -1].contiguous(), send_back=lambda results: results[order]
    )
