"""Cross-entropy that never holds FP32 values of every logit."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from nvfp4_train.model.kernels import pointwise as _kernels  # noqa: F401 - makes the ops
from nvfp4_train.model.kernels.program import is_fused

IGNORE_INDEX = -100  # label of a token that is not counted, as in torch.nn.functional.cross_entropy
CHUNK_ELEMENTS_CPU = 2**19  # 2 MiB of FP32: stays in the cache of a core
CHUNK_ELEMENTS = 2**26  # 256 MiB of FP32: enough to fill an accelerator


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum the cross-entropy over the tokens whose label is not ``IGNORE_INDEX``.

    Works through chunks of tokens in FP32 and recomputes the probabilities in backward, so besides the logits and their
    gradient (both in the dtype of ``logits``) only one chunk is alive; on a CPU a kernel makes one pass of it.

    Args:
        logits: [T, V] floating.
        labels: [T] int64, each in [0, V) or ``IGNORE_INDEX``.

    Returns:
        FP32 scalar (FP64 for FP64 logits).
    """
    return _CrossEntropySum.apply(logits, labels, torch.empty_like)


def cross_entropy_sum_(logits: Tensor, labels: Tensor) -> Tensor:
    """Return ``cross_entropy_sum``; backward overwrites the logits with their gradient, so that there is room for one.

    For logits that nothing else reads afterwards. Autograd reports those that are read all the same.
    """
    return _CrossEntropySum.apply(logits, labels, _itself)


def _itself(logits: Tensor) -> Tensor:
    return logits


class _CrossEntropySum(torch.autograd.Function):
    """``place`` makes the memory for the gradient from the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, place: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.place = place
        if is_fused(logits):
            losses, log_sums = torch.ops.nvfp4_train.cross_entropy(logits, labels)
            ctx.save_for_backward(logits, labels, log_sums)
            return losses.sum()
        ctx.save_for_backward(logits, labels)
        counted = labels != IGNORE_INDEX
        target = labels.where(counted, 0)[:, None]
        chosen = [
            logits[rows].to(_precise(logits)).log_softmax(dim=-1).gather(1, target[rows])[:, 0]
            for rows in _chunks(logits)
        ]
        return -torch.cat(chosen).where(counted, 0).sum()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None, None]:
        logits, labels, *log_sums = ctx.saved_tensors
        grad_logits = ctx.place(logits)
        if log_sums:
            torch.ops.nvfp4_train.cross_entropy_backward(grad_loss, logits, labels, *log_sums, grad_logits)
            return grad_logits, None, None
        counted = labels != IGNORE_INDEX
        target = labels.where(counted, 0)
        row_grad = torch.where(counted, grad_loss, 0.0)[:, None]
        for rows in _chunks(logits):
            grad = logits[rows].to(_precise(logits)).softmax(dim=-1)
            grad[torch.arange(len(grad), device=grad.device), target[rows]] -= 1
            grad_logits[rows] = grad.mul_(row_grad[rows])
        return grad_logits, None, None


def _precise(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _chunks(logits: Tensor) -> Iterator[slice]:
    elements = CHUNK_ELEMENTS_CPU if logits.device.type == "cpu" else CHUNK_ELEMENTS
    size = max(1, elements // logits.shape[1])
    return (slice(start, start + size) for start in range(0, len(logits), size))
