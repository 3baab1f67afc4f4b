"""Causal attention within documents: ways to the same numbers.

On a CPU a kernel looks at no more than what each query sees. Without it each document is a call of its own, so that
packing many short documents costs less than one long one. On CUDA a compiled kernel skips the blocks that the mask
closes. Where neither is known, a mask of [B, S, S] does it.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from nvfp4_train.model.documents import Documents
from nvfp4_train.model.kernels.attention import attend_fused
from nvfp4_train.model.kernels.program import is_fused

MIN_CHUNK_TOKENS = 128  # queries that a sliding window handles together, at least


def attend(query: Tensor, key: Tensor, value: Tensor, *, documents: Documents, window_tokens: int) -> Tensor:
    """Let each query attend to the keys of its document, up to its own place.

    Args:
        query: [B, H, S, P] of the tokens held here.
        key: [B, G, K, P] of the places ``documents.seen_keys``; head j of G serves query heads ``j*r`` to
            ``j*r + r-1``.
        value: [B, G, K, P], like ``key``.
        documents: Of the batch.
        window_tokens: Tokens that a query sees, itself included; 0: no limit.

    Returns:
        [B, H, S, P].
    """
    if documents.part is None and is_fused(query):
        return attend_fused(query, key, value, documents.first_seen(window_tokens=window_tokens))
    if documents.part is None and documents.one_per_row and not 0 < window_tokens < query.shape[2]:
        return _causal(query, key, value)
    if query.is_cuda:
        blocks = documents.block_mask(window_tokens=window_tokens)
        return _compiled_flex_attention()(query, key, value, block_mask=blocks, enable_gqa=_is_grouped(query, key))
    if documents.spans is not None:
        return _attend_by_document(query, key, value, documents, window_tokens)
    mask = documents.causal_mask(window_tokens=window_tokens)[:, None]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=_is_grouped(query, key))


@cache
def _compiled_flex_attention() -> Any:
    """Flex attention is a fused kernel only when it is compiled."""
    return torch.compile(flex_attention, dynamic=False)


@torch.compiler.disable
def _attend_by_document(query: Tensor, key: Tensor, value: Tensor, documents: Documents, window_tokens: int) -> Tensor:
    """Write each document's result to its place; a compiled graph would be made anew for every layout."""
    rows: list[list[Tensor]] = [[] for _ in range(len(query))]
    held = documents.first - documents.seen_keys(window_tokens=window_tokens).start  # keys before the first query
    assert documents.spans is not None
    for span in documents.spans:
        own = query[span.row, None, :, span.start : span.end]
        first, end = held + max(span.start - span.num_preceding, -held), held + span.end
        seen = (tensor[span.row, None, :, first:end] for tensor in (key, value))
        rows[span.row].append(_attend_one(own, *seen, window_tokens=window_tokens))
    return torch.cat([torch.cat(parts, dim=2) for parts in rows])


def _attend_one(query: Tensor, key: Tensor, value: Tensor, *, window_tokens: int) -> Tensor:
    """Attend within one document; with a window at a cost that is linear in its length.

    Args:
        query: [1, H, L, P] of the last L of the document's tokens.
        key: [1, G, M, P] of all its M tokens.
        value: Like ``key``.
        window_tokens: As for ``attend``.
    """
    size, num_keys = query.shape[2], key.shape[2]
    num_preceding = num_keys - size
    step = max(window_tokens, MIN_CHUNK_TOKENS)
    if not 0 < window_tokens < num_keys:
        if not num_preceding:
            return _causal(query, key, value)
        window_tokens, step = num_keys, size
    outputs = []
    for start in range(0, size, step):
        end = min(start + step, size)
        first, last = max(0, num_preceding + start - window_tokens + 1), num_preceding + end
        place = torch.arange(num_preceding + start, last, device=query.device)
        age = place[:, None] - torch.arange(first, last, device=query.device)
        outputs.append(
            F.scaled_dot_product_attention(
                query[:, :, start:end],
                key[:, :, first:last],
                value[:, :, first:last],
                attn_mask=(age >= 0) & (age < window_tokens),
                enable_gqa=_is_grouped(query, key),
            )
        )
    return torch.cat(outputs, dim=2)


def _causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=_is_grouped(query, key))


def _is_grouped(query: Tensor, key: Tensor) -> bool:
    return query.shape[1] != key.shape[1]
