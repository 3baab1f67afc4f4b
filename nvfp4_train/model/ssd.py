"""The state-space scan of Mamba-2 as matrix products (state-space duality); the state restarts in each document."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nvfp4_train.model.row_part import RowPart


@dataclass(frozen=True, kw_only=True)
class ScanInputs:
    """Tokens as the recurrence ``state = exp(log_decay_t) * state + b_t x_t^T``, ``y_t = c_t state`` sees them.

    Args:
        x: [B, S, G, R, P]; R heads of each of G groups, already multiplied by the time step.
        log_decay: [B, S, G, R] FP32, <= 0.
        b: [B, S, G, N].
        c: [B, S, G, N].
    """

    x: Tensor
    log_decay: Tensor
    b: Tensor
    c: Tensor


@dataclass(frozen=True, kw_only=True)
class FinalState:
    """What a stretch of tokens leaves behind for the tokens that follow it.

    Args:
        state: [B, G, R, N, P] FP32 (FP64 if ``x`` is): of the last token's document.
        total_decay: [B, G, R] in the same dtype: the factor on a state that was there before the stretch; 0 where a
            document begins in it.
    """

    state: Tensor
    total_decay: Tensor


def ssd_scan(
    inputs: ScanInputs,
    *,
    document_ids: Tensor,
    chunk_size: int,
    initial_state: Tensor | None = None,
    part: RowPart | None = None,
) -> tuple[Tensor, FinalState]:
    """Run the recurrence for every head.

    Within a chunk of tokens the recurrence is one masked matrix product, between chunks a short loop over states: cost
    and memory are linear in S. Products take the dtype of ``x``; states and decays are FP32 (FP64 if ``x`` is), and
    decays are rounded to the dtype of ``x`` only where they enter a product.

    Documents are isolated bit for bit: sums of log-decays are taken over one document only, so that not even rounding
    passes from one to the next.

    Args:
        inputs: What is scanned.
        document_ids: [B, S] int; equal for tokens of one document, which are neighbours.
        chunk_size: Tokens per chunk; S need not be a multiple.
        initial_state: [B, G, R, N, P] of the first token's document before its first token here; None: zeros. Rows
            that begin with a new document must have zeros.
        part: Which part of longer rows these tokens are, where others scan the rest: the initial state comes from
            them, and so does the gradient of the final one. All of them scan at the same time. ``initial_state`` must
            be None.

    Returns:
        y [B, S, G, R, P] in the dtype of ``x``, and what is left after the last token.

    Source: Mamba-2, https://arxiv.org/abs/2405.21060, section 6.
    """
    size = inputs.x.shape[1]
    chunks = _divide(inputs, document_ids=document_ids, chunk_size=chunk_size)
    y = _WithinChunks.apply(
        chunks.x, chunks.cumulative, _scores(chunks.b, chunks.c), (chunks.masks.causal, chunks.remainder)
    )
    states, final = _states(chunks, initial_state, part)
    read = (chunks.c.transpose(2, 3) @ states).transpose(2, 3)  # [B, L, C, G, R*P]
    from_start = chunks.cumulative.exp() * chunks.masks.from_state
    y = y + scale_heads(read.unflatten(-1, chunks.x.shape[-2:]), from_start)
    return y.flatten(1, 2)[:, :size], final


def scale_heads(x: Tensor, factor: Tensor) -> Tensor:
    """Multiply each head's channels [..., P] by its factor [...], first rounded to ``x.dtype``: one memory pass."""
    return x * factor[..., None].to(x.dtype)


@dataclass(frozen=True, kw_only=True)
class _ChunkMasks:
    """Which tokens of a chunk may exchange what: 1 or 0, in the dtype of the decays."""

    causal: Tensor  # [B, L, C, C]: the column's token reaches the row's token
    from_state: Tensor  # [B, L, C, 1, 1]: the state at the chunk's start belongs to the token's document
    to_state: Tensor  # [B, L, C, 1, 1]: the token's document is alive at the chunk's end
    carries: Tensor  # [B, L, 1, 1]: the state at the chunk's start outlives the chunk


@dataclass(frozen=True, kw_only=True)
class _Chunks:
    """L chunks of C tokens."""

    x: Tensor  # [B, L, C, G, R, P]
    cumulative: Tensor  # [B, L, C, G, R]: log-decays summed from the chunk's or the document's start
    remainder: Tensor  # [B, L, C, G, R]: what rounding took from those sums, without a gradient
    b: Tensor  # [B, L, C, G, N]
    c: Tensor  # [B, L, C, G, N]
    masks: _ChunkMasks


def _divide(inputs: ScanInputs, *, document_ids: Tensor, chunk_size: int) -> _Chunks:
    size = inputs.x.shape[1]
    chunk_size = min(chunk_size, size)
    padding = -size % chunk_size
    tensors: tuple[Tensor, ...] = (inputs.x, inputs.log_decay, inputs.b, inputs.c)
    if padding:  # x = 0 and log_decay = 0 leave the state as it is
        tensors = tuple(F.pad(t, (0, 0) * (t.ndim - 2) + (0, padding)) for t in tensors)
        document_ids = torch.cat((document_ids, document_ids[:, -1:].expand(-1, padding)), dim=1)
    x, log_decay, b, c, ids = (t.unflatten(1, (-1, chunk_size)) for t in (*tensors, document_ids))
    masks = _chunk_masks(ids, dtype=log_decay.dtype)
    # A product with a 0/1 mask, not a cumulative sum: another document's terms are exact zeros. FP64 so that no setting
    # of the backend's FP32 products (TF32, BF16) rounds the decays.
    sums = torch.einsum("blts,blsgr->bltgr", masks.causal.double(), log_decay.double())
    cumulative = sums.to(log_decay.dtype)
    # Neighbours late in a chunk have large sums that differ by little: their rounding would be an error of the decay.
    remainder = (sums.detach() - cumulative.detach()).to(log_decay.dtype)
    return _Chunks(x=x, cumulative=cumulative, remainder=remainder, b=b, c=c, masks=masks)


def _chunk_masks(ids: Tensor, *, dtype: torch.dtype) -> _ChunkMasks:
    last = ids[:, :, -1]  # [B, L]
    before = torch.cat((ids[:, :1, 0], last[:, :-1]), dim=1)  # an initial state belongs to the first token's document
    return _ChunkMasks(
        causal=(ids[..., :, None] == ids[..., None, :]).tril().to(dtype),
        from_state=(ids == before[..., None])[..., None, None].to(dtype),
        to_state=(ids == last[..., None])[..., None, None].to(dtype),
        carries=(before == last)[..., None, None].to(dtype),
    )


def _exp_of_negative(log_decay: Tensor) -> Tensor:
    """Exponentiate in place; pairs of tokens that a mask removes afterwards may be positive and must not overflow."""
    return log_decay.clamp_(max=0).exp_()


class _WithinChunks(torch.autograd.Function):
    """What the tokens of a chunk receive from each other.

    Written out because autograd would keep and traverse several FP32 tensors of size [B, L, G, R, C, C] where this
    keeps one in the dtype of ``x``. ``exact`` is the causal mask and the remainder of the sums, which have no gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cumulative: Tensor, scores: Tensor, exact: tuple[Tensor, Tensor]) -> Tensor:
        causal, remainder = exact
        decay = _differences(cumulative)
        if x.dtype is torch.float32:  # a narrower dtype rounds the decays by more, FP64 has no remainder to speak of
            decay += _differences(remainder)
        decay = _exp_of_negative(decay)
        decay = decay.mul_(causal[:, :, None, None]).to(x.dtype)  # [B, L, G, R, C, C]
        ctx.save_for_backward(x, scores, decay)
        return _tokens_first((scores * decay) @ _heads_first(x))

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, scores, decay = ctx.saved_tensors
        grad_y = _heads_first(grad_y).contiguous()
        weights = scores * decay
        grad_x = _tokens_first(weights.mT @ grad_y)
        grad_weights = grad_y @ _heads_first(x).mT
        # What a sum of log-decays gains at its end it loses at its start. Both sums are of the same FP32 values, so
        # that they cancel where no decay lies between.
        flow = (grad_weights * weights).to(torch.promote_types(x.dtype, torch.float32))
        grad_cumulative = (flow.sum(-1) - flow.sum(-2)).permute(0, 1, 4, 2, 3)  # [B, L, C, G, R]
        grad_scores = (grad_weights * decay).sum(dim=3, keepdim=True)  # [B, L, G, 1, C, C]
        return grad_x, grad_cumulative, grad_scores, None


def _differences(sums: Tensor) -> Tensor:
    """Return the sum at each token less that at each token of its chunk, [B, L, G, R, C, C]."""
    by_head = sums.permute(0, 1, 3, 4, 2).contiguous()  # [B, L, G, R, C]; results inherit its strides
    return by_head[..., :, None] - by_head[..., None, :]


def _scores(b: Tensor, c: Tensor) -> Tensor:
    """Return c_t . b_s, [B, L, G, 1, C, C]."""
    return (c.transpose(2, 3) @ b.permute(0, 1, 3, 4, 2))[:, :, :, None]


def _heads_first(x: Tensor) -> Tensor:
    return x.permute(0, 1, 3, 4, 2, 5)  # [B, L, G, R, C, P]


def _tokens_first(x: Tensor) -> Tensor:
    return x.permute(0, 1, 4, 2, 3, 5).contiguous()  # [B, L, C, G, R, P]; mixed strides make later sums slow


def _states(chunks: _Chunks, initial_state: Tensor | None, part: RowPart | None) -> tuple[Tensor, FinalState]:
    """Return the state at the start of each chunk, [B, L, G, N, R*P], and what the last chunk leaves."""
    x, cumulative, remainder, masks = chunks.x, chunks.cumulative, chunks.remainder, chunks.masks
    end = cumulative[:, :, -1:]
    to_end = _exp_of_negative((end - cumulative) + (remainder[:, :, -1:] - remainder)) * masks.to_state
    leaving = scale_heads(x, to_end).flatten(4)  # [B, L, C, G, R*P]
    added = chunks.b.permute(0, 1, 3, 4, 2) @ leaving.transpose(2, 3)  # [B, L, G, N, R*P]
    decay = end[:, :, 0].exp() * masks.carries  # [B, L, G, R]
    initial = None
    if initial_state is not None:
        initial = initial_state.transpose(2, 3).flatten(3).to(decay.dtype)  # [B, G, N, R*P]
    by_channel = decay.repeat_interleave(x.shape[-1], dim=-1)[..., None, :]  # [B, L, G, 1, R*P]
    states, final = _PassStates.apply(added, by_channel, initial, part)
    total_decay = end[:, :, 0].sum(dim=1).exp() * masks.carries.prod(dim=1)
    return states, FinalState(state=final.unflatten(-1, x.shape[-2:]).transpose(2, 3), total_decay=total_decay)


class _PassStates(torch.autograd.Function):
    """From what each chunk adds to the state, the state at the start of each chunk, and after the last one.

    The state runs in the dtype of ``decay``, and so is returned after the last chunk; the others, which are kept for
    backward, have the dtype of ``added``.

    With ``part`` the chunks are part of a longer row. Each holder passes an empty state through its chunks first, all
    of them find their initial states from the results, and then the states are the same as in whole rows. Gradients go
    the same way in the other direction. What is left after the last chunk then has no gradient of its own.
    """

    @staticmethod
    def forward(
        ctx: Any, added: Tensor, decay: Tensor, initial: Tensor | None, part: RowPart | None
    ) -> tuple[Tensor, Tensor]:
        states = torch.empty_like(added)  # [B, L, G, N, R*P]
        state = torch.zeros_like(added[:, 0], dtype=decay.dtype) if initial is None else initial.clone()
        if part is not None:
            for index in range(added.shape[1]):
                state.mul_(decay[:, index]).add_(added[:, index])
            state = part.initial_state(state, total_decay=decay.prod(dim=1))
        for index in range(added.shape[1]):
            states[:, index] = state
            state.mul_(decay[:, index]).add_(added[:, index])
        ctx.save_for_backward(states, decay)
        ctx.has_initial, ctx.part = initial is not None, part
        if part is not None:
            ctx.mark_non_differentiable(state)
        return states, state

    @staticmethod
    def backward(ctx: Any, grad_states: Tensor, grad_final: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        states, decay = ctx.saved_tensors
        grad_added, grad_decay = torch.empty_like(states), torch.empty_like(decay)
        grad = torch.zeros_like(states[:, 0], dtype=decay.dtype) if ctx.part is not None else grad_final.clone()
        if ctx.part is not None:
            for index in reversed(range(states.shape[1])):
                grad.mul_(decay[:, index]).add_(grad_states[:, index])
            grad = ctx.part.grad_of_final_state(grad, total_decay=decay.prod(dim=1))
        for index in reversed(range(states.shape[1])):
            grad_added[:, index] = grad
            grad_decay[:, index] = (grad * states[:, index]).sum(dim=-2, keepdim=True)
            grad.mul_(decay[:, index]).add_(grad_states[:, index])
        return grad_added, grad_decay, grad if ctx.has_initial else None, None


def import_mamba_ssm() -> Callable[..., Tensor]:
    """Return the scan of mamba_ssm; raises what importing it raises."""
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    return mamba_chunk_scan_combined


def import_causal_conv1d() -> Callable[..., Tensor]:
    """Return the convolution of causal_conv1d; raises what importing it raises."""
    from causal_conv1d import causal_conv1d_fn

    return causal_conv1d_fn
