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

from nvfp4_train.model.documents import Documents, Span
from nvfp4_train.model.kernels.attention import attend_fused
from nvfp4_train.model.kernels.program import is_fused

MIN_CHUNK_TOKENS = 128  # queries that a sliding window handles together, at least


def attend(query: Tensor, key: Tensor, value: Tensor, *, documents: Documents, window_tokens: int) -> Tensor:
    """Let each query attend to the keys of its document, up to its own place.

    Args:
        query: [B, H, S, P].
        key: [B, G, S, P]; head j of G serves query heads ``j*r`` to ``j*r + r-1``.
        value: [B, G, S, P].
        documents: Of the batch.
        window_tokens: Tokens that a query sees, itself included; 0: no limit.

    Returns:
        [B, H, S, P].
    """
    size = query.shape[2]
    if is_fused(query):
        return attend_fused(query, key, value, documents.first_seen(window_tokens=window_tokens))
    if documents.one_per_row and not 0 < window_tokens < size:
        return _causal(query, key, value)
    if query.is_cuda:
        blocks = documents.block_mask(window_tokens=window_tokens)
        return _compiled_flex_attention()(query, key, value, block_mask=blocks, enable_gqa=_is_grouped(query, key))
    if documents.spans is not None:
        return _attend_by_document(query, key, value, documents.spans, window_tokens)
    mask = documents.causal_mask(window_tokens=window_tokens)[:, None]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=_is_grouped(query, key))


@cache
def _compiled_flex_attention() -> Any:
    """Flex attention is a fused kernel only when it is compiled."""
    return torch.compile(flex_attention, dynamic=False)


@torch.compiler.disable
def _attend_by_document(
    query: Tensor, key: Tensor, value: Tensor, spans: tuple[Span, ...], window_tokens: int
) -> Tensor:
    """Write each document's result to its place; a compiled graph would be made anew for every layout."""
    rows: list[list[Tensor]] = [[] for _ in range(len(query))]
    for span in spans:
        parts = (tensor[span.row, None, :, span.start : span.end] for tensor in (query, key, value))
        rows[span.row].append(_attend_one(*parts, window_tokens=window_tokens))
    return torch.cat([torch.cat(parts, dim=2) for parts in rows])


def _attend_one(query: Tensor, key: Tensor, value: Tensor, *, window_tokens: int) -> Tensor:
    """Attend within one document, [1, H, L, P]; with a window at a cost that is linear in L."""
    size = query.shape[2]
    if not 0 < window_tokens < size:
        return _causal(query, key, value)
    outputs = []
    step = max(window_tokens, MIN_CHUNK_TOKENS)
    for start in range(0, size, step):
        end, first = min(start + step, size), max(0, start - window_tokens + 1)
        age = torch.arange(start, end, device=query.device)[:, None] - torch.arange(first, end, device=query.device)
        outputs.append(
            F.scaled_dot_product_attention(
                query[:, :, start:end],
                key[:, :, first:end],
                value[:, :, first:end],
                attn_mask=(age >= 0) & (age < window_tokens),
                enable_gqa=_is_grouped(query, key),
            )
        )
    return torch.cat(outputs, dim=2)


def _causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=_is_grouped(query, key))


def _is_grouped(query: Tensor, key: Tensor) -> bool:
    return query.shape[1] != key.shape[1]
