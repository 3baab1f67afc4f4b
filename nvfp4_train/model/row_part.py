"""A contiguous part of every row of a batch, where others hold the rest, and how its tokens reach what is outside.

The model computes with the tokens that it is given. Where those are a part of every row, what a token needs of another
part comes through here; whole rows need nothing of it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RowExchange:
    """What the holders of the parts of the same rows do together; all of them call the same, in the same order.

    Args:
        num_parts: Parts of a row, all of the same size.
        gather: From [..., S of a part, ...] and the number of that dim to the whole rows; has a gradient.
        with_preceding: From [..., S of a part, ...], the number of that dim and a count, at most S, to the part with
            that many tokens of the part before it in front, zeros before the row; has a gradient.
        preceding: From [B, S of a part, ...] and a count to that many tokens before the part, [B, count, ...], zeros
            before the row; has a gradient.
        following: The same of the tokens after the part.
        carry_forward: From ``value`` and ``factor``, which broadcast, to what enters this part: a part passes on
            ``value + factor * (what enters it)``, and zeros enter the first. No gradient.
        carry_backward: The same from the last part to the first.
        sum: Elementwise sum over the parts; no gradient.
    """

    num_parts: int
    gather: Callable[[Tensor, int], Tensor]
    with_preceding: Callable[[Tensor, int, int], Tensor]
    preceding: Callable[[Tensor, int], Tensor]
    following: Callable[[Tensor, int], Tensor]
    carry_forward: Callable[[Tensor, Tensor], Tensor]
    carry_backward: Callable[[Tensor, Tensor], Tensor]
    sum: Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class RowPart:
    """Tokens ``first`` to ``first + size - 1`` of every row.

    Args:
        first: Place, in its row, of the first token held here.
        size: Tokens held of each row.
        whole_ids: [B, S] document ids of the whole rows.
        exchange: With those that hold the rest.
    """

    first: int
    size: int
    whole_ids: Tensor
    exchange: RowExchange

    @property
    def continues(self) -> Tensor:
        """[B] bool: does the document of a row's first token begin in an earlier part?"""
        if self.first == 0:
            return torch.zeros_like(self.whole_ids[:, 0], dtype=torch.bool)
        return self.whole_ids[:, self.first - 1] == self.whole_ids[:, self.first]

    def is_near(self, window_tokens: int) -> bool:
        """Whether the tokens that any token here sees, itself included, are in this part and the one before; 0: all."""
        return 0 < window_tokens <= self.size + 1

    def halo(self, x: Tensor, *, count: int) -> Tensor:
        """Return [B, count, ...] of the tokens before those of ``x``, with zeros for other documents than its first."""
        ids = self.whole_ids[:, max(0, self.first - count) : self.first]
        same = torch.zeros(len(ids), count, dtype=torch.bool, device=ids.device)
        same[:, count - ids.shape[1] :] = ids == self.whole_ids[:, self.first, None]
        return torch.where(same.view(*same.shape, *(1,) * (x.ndim - 2)), self.exchange.preceding(x, count), 0.0)

    def initial_state(self, final: Tensor, *, total_decay: Tensor) -> Tensor:
        """Return the state before the first token, from what each part makes of an empty one.

        Args:
            final: [B, ...], the state after the last token if none had been before the first.
            total_decay: [B, ...], broadcast: the factor on a state that was there before the first token.
        """
        continues = self._per_row(final)
        entering = self.exchange.carry_forward(final, torch.where(continues, total_decay, 0.0))
        return torch.where(continues, entering, 0.0)

    def grad_of_final_state(self, grad_initial: Tensor, *, total_decay: Tensor) -> Tensor:
        """Return the gradient of the state after the last token: ``initial_state``'s way back.

        Args:
            grad_initial: [B, ...], that of the state before the first token by this part's own outputs.
            total_decay: As for ``initial_state``.
        """
        continues = self._per_row(grad_initial)
        own = torch.where(continues, grad_initial, 0.0)
        return self.exchange.carry_backward(own, torch.where(continues, total_decay, 0.0))

    def _per_row(self, like: Tensor) -> Tensor:
        return self.continues.view(-1, *(1,) * (like.ndim - 1))
