"""Where the documents of a batch lie: what every mixer needs to keep them apart."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from nvfp4_train.model.row_part import RowExchange, RowPart


@dataclass(frozen=True, kw_only=True)
class Span:
    """One document, or the part of one that a row holds: tokens ``start`` to ``end - 1`` of row ``row``.

    ``num_preceding`` tokens of the document come before ``start`` in the whole row and are held elsewhere.
    """

    row: int
    start: int
    end: int
    num_preceding: int = 0


@dataclass(frozen=True, kw_only=True)
class Documents:
    """The documents packed into the rows of a batch.

    Args:
        ids: [B, S] int; tokens of one document are neighbours and share an id.
        positions: [B, S] int64; position of each token in its document.
        one_per_row: Whether every row is known to hold a single document, so that masks may be left out. False is
            always correct.
        spans: Every document, row by row, where the host knows them without waiting for a device; else None.
        part: Which part of the rows this is, where others hold the rest; None: the rows are whole. All else describes
            the tokens of the part, but for ``one_per_row``.
    """

    ids: Tensor
    positions: Tensor
    one_per_row: bool
    spans: tuple[Span, ...] | None = None
    part: RowPart | None = None
    _block_masks: dict[int, BlockMask] = field(default_factory=dict, init=False, repr=False, compare=False)

    def causal_mask(self, *, window_tokens: int = 0) -> Tensor:
        """Return [B, S, K] bool: may the query (dim 1) see the key (dim 2)? Keys are those of ``seen_keys``.

        Args:
            window_tokens: Tokens that a query sees, itself included; 0: no limit.
        """
        keys, device = self.seen_keys(window_tokens=window_tokens), self.ids.device
        place = torch.arange(keys.start, keys.stop, device=device)
        age = torch.arange(self.first, self.first + self.ids.shape[1], device=device)[:, None] - place
        may_see = (age >= 0) & (place >= 0)
        if window_tokens:
            may_see &= age < window_tokens
        return (self.ids[:, :, None] == self.whole_ids[:, None, place.clamp(min=0)]) & may_see

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
            first, ids, limit = self.first, self.whole_ids, window_tokens or self.whole_ids.shape[1]
            keys = self.seen_keys(window_tokens=window_tokens)
            first_key = keys.start

            def may_see(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
                place, seen = first + query, first_key + key
                is_near = (seen >= 0) & (seen <= place) & (place - seen < limit)
                return is_near & (ids[row, place] == ids[row, seen.clamp(min=0)])

            self._block_masks[window_tokens] = create_block_mask(
                may_see, B=len(ids), H=None, Q_LEN=self.ids.shape[1], KV_LEN=len(keys), device=str(ids.device)
            )
        return self._block_masks[window_tokens]

    @property
    def first(self) -> int:
        """Place, in its row, of the first token held here."""
        return 0 if self.part is None else self.part.first

    @property
    def whole_ids(self) -> Tensor:
        """Ids of whole rows."""
        return self.ids if self.part is None else self.part.whole_ids

    def seen_keys(self, *, window_tokens: int = 0) -> range:
        """Return the places, in a row, of the keys that attention is computed with.

        Those of whole rows; where a window reaches no further than into the part before, of that and of the tokens held
        here, with places below 0 before the first part.

        Args:
            window_tokens: Tokens that a query sees, itself included; 0: no limit.
        """
        if self.part is not None and self.part.is_near(window_tokens):
            return range(self.first + 1 - window_tokens, self.first + self.part.size)
        return range(self.whole_ids.shape[1])

    def with_seen(self, key: Tensor, value: Tensor, *, window_tokens: int = 0) -> tuple[Tensor, Tensor]:
        """Return the keys and values [B, G, K, P] of ``seen_keys``, from those of the tokens held here."""
        if self.part is None:
            return key, value
        both, exchange = torch.stack((key, value)), self.part.exchange
        if self.part.is_near(window_tokens):
            seen_key, seen_value = exchange.with_preceding(both, 3, window_tokens - 1).unbind()
        else:
            seen_key, seen_value = exchange.gather(both, 3).unbind()
        return seen_key, seen_value

    def halo(self, x: Tensor, *, count: int) -> Tensor | None:
        """Return what precedes ``x``, as ``RowPart.halo``, or None where every row is whole."""
        return None if self.part is None else self.part.halo(x, count=count)

    def with_following(self, values: Tensor, *, count: int) -> tuple[Tensor, Tensor]:
        """Return [B, S + count, ...] values and [B, S + count] ids, those after the tokens held here included.

        Where rows end here, which is always so for whole rows, both are shorter.
        """
        if self.part is None:
            return values, self.ids
        ids = self.whole_ids[:, self.first : self.first + self.ids.shape[1] + count]
        following = self.part.exchange.following(values, count)
        return torch.cat((values, following), dim=1)[:, : ids.shape[1]], ids

    def mean_over_parts(self, number: Tensor) -> Tensor:
        """Return the mean of a number over those that hold parts of the same rows; no gradient."""
        return number if self.part is None else self.part.exchange.sum(number) / self.part.exchange.num_parts


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


def take_part(whole: Documents, *, first: int, size: int, exchange: RowExchange) -> Documents:
    """Return the documents of tokens ``first`` to ``first + size - 1`` of every row."""
    spans = None
    if whole.spans is not None:
        end = first + size
        spans = tuple(
            Span(
                row=span.row,
                start=max(span.start, first) - first,
                end=min(span.end, end) - first,
                num_preceding=max(0, first - span.start),
            )
            for span in whole.spans
            if span.start < end and span.end > first
        )
    here = slice(first, first + size)
    return replace(
        whole,
        ids=whole.ids[:, here],
        positions=whole.positions[:, here],
        spans=spans,
        part=RowPart(first=first, size=size, whole_ids=whole.ids, exchange=exchange),
    )


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
