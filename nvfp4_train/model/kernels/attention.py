"""Calls into the attention kernels, as custom ops that torch.compile sees as opaque."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from nvfp4_train.model.kernels.program import PROGRAM
from nvfp4_train.numerics.kernels.loader import library

_pointer, _int64, _int32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_VECTOR, _TOKENS = 16, 64  # kWide, kTokens


class _Attention(ctypes.Structure):
    """Mirror of `struct Attention` in attention.cpp."""

    _fields_ = [
        *(
            (name, _pointer)
            for name in (
                "query", "key", "value", "first", "out", "log_sums", "grad_out", "products", "grad_query", "grad_key",
                "grad_value", "turned", "paired",
            )
        ),
        *((name, _int64) for name in ("rows", "heads", "kv_heads", "size", "width")),
        *((f"{name}_strides", _int64 * 3) for name in ("query", "key", "value", "out", "grad_out")),
        *((name, _int32) for name in ("is_fp32", "threads")),
    ]  # fmt: skip


def attend_fused(query: Tensor, key: Tensor, value: Tensor, first: Tensor) -> Tensor:
    """Attend to the tokens from ``first`` up to each query's own place.

    Args:
        query: [B, H, S, P], FP32 or BF16.
        key: [B, G, S, P].
        value: [B, G, S, P].
        first: [B, S] int64; does not fall along S.

    Returns:
        [B, H, S, P].
    """
    return _Attend.apply(query, key, value, first)


class _Attend(torch.autograd.Function):
    """Keeps its inputs, its output and the log of each query's sum of exponentials."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, first: Tensor) -> Tensor:
        out, log_sums = torch.ops.nvfp4_train.attention_forward(query, key, value, first)
        ctx.save_for_backward(query, key, value, first, out, log_sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        tensors = list(ctx.saved_tensors)
        return *torch.ops.nvfp4_train.attention_backward(grad_out, tensors), None


@torch.library.custom_op("nvfp4_train::attention_forward", mutates_args=())
def attention_forward(query: Tensor, key: Tensor, value: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """The result, and the log of each query's sum of exponentials, fp32 [B, H, S]."""
    out, log_sums = _results(query)
    named = {"query": query, "key": key, "value": value, "out": out}
    call, kept = _call(named, first=first, slots=query.shape[0] * 2 * key.shape[1])
    call.log_sums = log_sums.data_ptr()
    library(PROGRAM).attention_forward(ctypes.byref(call))
    del kept  # alive until here
    return out, log_sums


@attention_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001 - the op's
    return _results(query)


@torch.library.custom_op("nvfp4_train::attention_backward", mutates_args=())
def attention_backward(grad_out: Tensor, saved: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; ``saved`` holds them, the first tokens, the result and the log of sums."""
    query, key, value, first, out, log_sums = saved
    named = {"query": query, "key": key, "value": value, "out": out, "grad_out": grad_out}
    rows, heads = query.shape[:2]
    call, kept = _call(named, first=first, slots=2 * rows * (key.shape[1] + heads))
    grads, products = [_like(tensor) for tensor in (query, key, value)], torch.empty_like(log_sums)
    call.log_sums, call.products = log_sums.data_ptr(), products.data_ptr()
    for name, grad in zip(("grad_query", "grad_key", "grad_value"), grads, strict=True):
        setattr(call, name, grad.data_ptr())
    library(PROGRAM).attention_backward(ctypes.byref(call))
    del kept
    return grads[0], grads[1], grads[2]


@attention_backward.register_fake
def _(grad_out: Tensor, saved: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ARG001 - the op's signature
    return _like(saved[0]), _like(saved[1]), _like(saved[2])


def _results(query: Tensor) -> tuple[Tensor, Tensor]:
    return _like(query), query.new_empty(query.shape[:3], dtype=torch.float32)


def _like(x: Tensor) -> Tensor:
    """Memory for [B, heads, S, P] in the order of projections, [B, S, heads, P]."""
    rows, heads, size, width = x.shape
    return x.new_empty(rows, size, heads, width).transpose(1, 2)


def _call(named: dict[str, Tensor], *, first: Tensor, slots: int) -> tuple[_Attention, list[Tensor]]:
    """Return the job, and the tensors that it points to and the caller must keep alive."""
    named = {name: tensor if tensor.stride(3) == 1 else tensor.contiguous() for name, tensor in named.items()}
    query = named["query"]
    rows, heads, size, width = query.shape
    call = _Attention(rows=rows, heads=heads, kv_heads=named["key"].shape[1], size=size, width=width)
    for name, tensor in named.items():
        setattr(call, name, tensor.data_ptr())
        setattr(call, f"{name}_strides", (_int64 * 3)(*tensor.stride()[:3]))
    per_word = 1 if query.dtype is torch.float32 else 2
    words, whole_size, whole_width = -(-width // per_word), _whole(size) + _VECTOR, _whole(width)
    turned = query.new_zeros(slots, words, whole_size, dtype=torch.float32)
    paired = query.new_zeros(slots, -(-(size + _TOKENS) // per_word), whole_width, dtype=torch.float32)
    first = first.contiguous()
    call.first, call.turned, call.paired = first.data_ptr(), turned.data_ptr(), paired.data_ptr()
    call.is_fp32, call.threads = int(query.dtype is torch.float32), torch.get_num_threads()
    return call, [*named.values(), turned, paired, first]


def _whole(count: int) -> int:
    return -(-count // _VECTOR) * _VECTOR
