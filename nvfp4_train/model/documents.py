"""Where the documents of a batch lie: what every mixer needs to keep them apart."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask


@dataclass(frozen=True, kw_only=True)
class Span:
    """One document, or the part of one that a row holds: tokens ``start`` to ``end - 1`` of row ``row``."""

    row: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Documents:
    """The documents packed into the rows of a batch.

    Args:
        ids: [B, S] int; tokens of one document are neighbours and share an id.
        positions: [B, S] int64; position of each token in its document.
        one_per_row: Whether every row is known to hold a single document, so that masks may be left out. False is
            always correct.
        spans: Every document, row by row, where the host knows them without waiting for a device; else None.
    """

    ids: Tensor
    positions: Tensor
    one_per_row: bool
    spans: tuple[Span, ...] | None = None
    _block_masks: dict[int, BlockMask] = field(default_factory=dict, init=False, repr=False, compare=False)

    def causal_mask(self, *, window_tokens: int = 0) -> Tensor:
        """Return [B, S, S] bool: may the query (dim 1) see the key (dim 2)?

        Args:
            window_tokens: Tokens that a query sees, itself included; 0: no limit.
        """
        size = self.ids.shape[1]
        causal = torch.ones(size, size, dtype=torch.bool, device=self.ids.device).tril()
        if window_tokens:
            causal = causal.triu(1 - window_tokens)
        return (self.ids[:, :, None] == self.ids[:, None, :]) & causal

    def first_seen(self, *, window_tokens: int = 0) -> Tensor:
        """Return [B, S] int64: the first token that each query sees; the last is itself.

        Args:
            window_tokens: Tokens that a query sees, itself included; 0: no limit.
        """
        index = torch.arange(self.ids.shape[1], device=self.ids.device).expand(self.ids.shape)
        first = index - _positions_in_document(_find_starts(self.ids))
        return first.maximum(index - window_tokens + 1) if window_tokens else first

    def block_mask(self, *, window_tokens: int = 0) -> BlockMask:
        """Return ``causal_mask`` in the form that skips whole blocks; made once per batch and window."""
        if window_tokens not in self._block_masks:
            ids, limit = self.ids, window_tokens or self.ids.shape[1]

            def may_see(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
                return (key <= query) & (query - key < limit) & (ids[row, query] == ids[row, key])

            rows, size = ids.shape
            self._block_masks[window_tokens] = create_block_mask(
                may_see, B=rows, H=None, Q_LEN=size, KV_LEN=size, device=str(ids.device)
            )
        return self._block_masks[window_tokens]


def locate_documents(document_ids: Tensor, position_ids: Tensor | None = None) -> Documents:
    """Prepare the document layout of a batch once for all blocks.

    Only a CPU tensor is inspected for ``one_per_row`` and ``spans``: elsewhere that would wait for the device.

    Args:
        document_ids: [B, S] int; equal for tokens of one document, which are neighbours.
        position_ids: [B, S] int64; derived from the ids if None.

    Raises:
        ValueError: if the shapes differ.
    """
    is_start = _find_starts(document_ids)
    if position_ids is None:
        position_ids = _positions_in_document(is_start)
    if position_ids.shape != document_ids.shape:
        raise ValueError(
            f"position_ids {tuple(position_ids.shape)} must be shaped like document_ids {tuple(document_ids.shape)}"
        )
    spans = _find_spans(is_start) if document_ids.device.type == "cpu" else None
    one_per_row = spans is not None and len(spans) == len(document_ids)
    return Documents(ids=document_ids, positions=position_ids, one_per_row=one_per_row, spans=spans)


def _find_starts(document_ids: Tensor) -> Tensor:
    is_start = torch.ones_like(document_ids, dtype=torch.bool)
    is_start[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return is_start


def _find_spans(is_start: Tensor) -> tuple[Span, ...]:
    rows, size = is_start.shape
    starts = is_start.flatten().nonzero().flatten().tolist()  # every row begins with one
    ends = [*starts[1:], rows * size]
    return tuple(
        Span(row=start // size, start=start % size, end=start % size + end - start)
        for start, end in zip(starts, ends, strict=True)
    )


def _positions_in_document(is_start: Tensor) -> Tensor:
    index = torch.arange(is_start.shape[1], device=is_start.device).expand(is_start.shape)
    start = torch.where(is_start, index, 0).cummax(dim=1).values
    return index - start
