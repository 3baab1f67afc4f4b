"""Tensor parallelism of the vocabulary: each rank holds equally many rows of the embedding and of the output head.

A token's embedding is the sum of what the ranks find in their rows, which is something on one of them. Logits stay
where they are computed; the cross-entropy needs three numbers per token from all ranks: the largest logit, the sum of
exponents and the logit of the label.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from nvfp4_train.model.documents import Documents
from nvfp4_train.model.hybrid import HybridLM
from nvfp4_train.model.loss import IGNORE_INDEX
from nvfp4_train.parallel.collectives import gather_equal
from nvfp4_train.parallel.tensor import TensorParallel, hold_parts, split_outputs

CHUNK_ELEMENTS = 2**19  # of FP32 logits that are alive at a time, as in the loss of one rank

_ops = torch.ops._c10d_functional


def split_vocabulary(model: HybridLM, tp: TensorParallel) -> None:
    """Spread a model's embedding and output head over the ranks, in place, and with them its loss.

    A part of a model may have neither.
    """
    if model.embedding is not None:
        _split_embedding(model.embedding, tp)
    if model.cfg.tie_embeddings:
        model.tied_logits = partial(_tied_logits, tp, model.tied_logits)
    if model.lm_head is not None:
        split_outputs(model.lm_head, tp)
        model.lm_head.forward = partial(_head_logits, tp, model.lm_head.forward)  # type: ignore[method-assign]
    model.cross_entropy = partial(cross_entropy_sum_, group=tp.group)
    model.whole_logits = partial(gather_equal, dim=-1, group=tp.group)
    model.later_embeddings = partial(_later_embeddings, tp, model.later_embeddings)


def cross_entropy_sum_(logits: Tensor, labels: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """Sum the cross-entropy over the tokens whose label is not ``IGNORE_INDEX``; backward overwrites the logits.

    Nothing reads them afterwards, so that their gradient takes their place.

    Args:
        logits: [T, V / ranks] floating: those of this rank's part of the vocabulary.
        labels: [T] int64, each in [0, V) or ``IGNORE_INDEX``; the same on all ranks.
        group: The ranks.

    Returns:
        FP32 scalar (FP64 for FP64 logits), the same on all ranks; its gradient must be, too.
    """
    return _CrossEntropySum.apply(logits, labels, group)


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: dist.ProcessGroup) -> Tensor:
        place, is_here = _own_labels(logits, labels, group)
        largest = torch.cat([logits[rows].to(_precise(logits)).amax(dim=-1) for rows in _chunks(logits)])
        largest = _reduced(largest, "max", group)
        sums, chosen = torch.zeros_like(largest), torch.zeros_like(largest)
        for rows in _chunks(logits):
            shifted = logits[rows].to(_precise(logits)) - largest[rows, None]
            chosen[rows] = shifted.gather(1, place[rows, None])[:, 0].where(is_here[rows], 0)
            sums[rows] = shifted.exp_().sum(dim=-1)
        sums, chosen = _reduced(torch.stack((sums, chosen)), "sum", group)
        log_sum = sums.log()
        ctx.save_for_backward(logits, labels, largest + log_sum)
        ctx.group = group
        return (log_sum - chosen).where(labels != IGNORE_INDEX, 0).sum()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None, None]:
        logits, labels, log_sum_exp = ctx.saved_tensors
        place, is_here = _own_labels(logits, labels, ctx.group)
        row_grad = torch.where(labels != IGNORE_INDEX, grad_loss, 0.0)[:, None]
        for rows in _chunks(logits):
            grad = (logits[rows].to(_precise(logits)) - log_sum_exp[rows, None]).exp_()
            grad.scatter_add_(1, place[rows, None], -is_here[rows, None].to(grad.dtype))
            logits[rows] = grad.mul_(row_grad[rows])
        return logits, None, None


def _own_labels(logits: Tensor, labels: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return the column of each token's label among this rank's, and whether it is one of them."""
    return _own_rows(labels, first=group.rank() * logits.shape[1], count=logits.shape[1])


def _own_rows(tokens: Tensor, *, first: int, count: int) -> tuple[Tensor, Tensor]:
    index = tokens - first
    is_here = (index >= 0) & (index < count)
    return index.where(is_here, 0), is_here


def _reduced(x: Tensor, operation: str, group: dist.ProcessGroup) -> Tensor:
    return _ops.wait_tensor(_ops.all_reduce(x, operation, group.group_name))


def _precise(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _chunks(logits: Tensor) -> Iterator[slice]:
    size = max(1, CHUNK_ELEMENTS // logits.shape[1])
    return (slice(start, start + size) for start in range(0, len(logits), size))


def _split_embedding(embedding: nn.Embedding, tp: TensorParallel) -> None:
    embedding.forward = partial(_embed, embedding, tp)  # type: ignore[method-assign]
    hold_parts(embedding, tp.dense, Shard(0))


def _embed(embedding: nn.Embedding, tp: TensorParallel, tokens: Tensor) -> Tensor:
    weight = embedding.weight
    place, is_here = _own_rows(tokens, first=tp.rank * len(weight), count=len(weight))
    found = F.embedding(place, weight).where(is_here[..., None], 0)
    # A tensor of its own: FSDP warns of results that are views.
    return tp.leave(found, dtype=tp.compute_dtype).clone()


def _head_logits(tp: TensorParallel, project: Callable[[Tensor], Tensor], h: Tensor) -> Tensor:
    return project(tp.enter(h, dtype=tp.part_dtype))


def _tied_logits(tp: TensorParallel, project: Callable[..., Tensor], h: Tensor, weight: Tensor) -> Tensor:
    return project(tp.enter(h), cast(DTensor, weight).to_local())


def _later_embeddings(
    tp: TensorParallel, shift: Callable[..., Tensor], embedded: Tensor, documents: Documents, *, by: int
) -> Tensor:
    """A token's later neighbours may be another rank's."""
    if not tp.keeps_parts:
        return shift(embedded, documents, by=by)
    return tp.own_tokens(shift(tp.enter(embedded), documents, by=by))
