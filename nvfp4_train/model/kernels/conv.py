"""Calls into the convolution kernels, as custom ops that torch.compile sees as opaque."""

import ctypes

import torch
from torch import Tensor

from nvfp4_train.model.kernels.program import PROGRAM
from nvfp4_train.numerics.kernels.loader import library

_pointer, _int64, _int32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_TOKENS = 128  # kTokens in conv.cpp


class _Conv(ctypes.Structure):
    """Mirror of `struct Conv` in conv.cpp."""

    _fields_ = [
        *((name, _pointer) for name in ("x", "taps", "bias", "ids", "y", "grad_y", "grad_x", "grad_taps")),
        *((name, _int64) for name in ("rows", "size", "groups", "width", "d_conv")),
        ("x_strides", _int64 * 3),
        *((name, _int32) for name in ("is_fp32", "threads")),
    ]


@torch.library.custom_op("nvfp4_train::conv_forward", mutates_args=())
def conv_forward(x: Tensor, weight: Tensor, bias: Tensor | None, document_ids: Tensor | None) -> Tensor:
    """Convolve and apply SiLU.

    Args:
        x: [B, S, G, W].
        weight: fp32 [G * W, d_conv].
        bias: fp32 [G * W] or None.
        document_ids: [B, S] int, or None where each row is one document.
    """
    y = x.new_empty(x.shape)
    call, kept = _call(x, weight, bias, document_ids)
    call.y = y.data_ptr()
    library(PROGRAM).conv_forward(ctypes.byref(call))
    del kept  # alive until here
    return y


@conv_forward.register_fake
def _(
    x: Tensor,
    weight: Tensor,  # noqa: ARG001 - the op's signature
    bias: Tensor | None,  # noqa: ARG001
    document_ids: Tensor | None,  # noqa: ARG001
) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("nvfp4_train::conv_backward", mutates_args=())
def conv_backward(
    grad_y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, document_ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients of x, and of the taps with that of the bias after them, fp32 [d_conv + 1, G * W]."""
    grad_y = grad_y.contiguous()
    grad_x, grad_taps = _grads(x, weight)
    call, kept = _call(x, weight, bias, document_ids)
    partial = grad_taps.new_empty(x.shape[0] * -(-x.shape[1] // _TOKENS), *grad_taps.shape)
    call.grad_y, call.grad_x, call.grad_taps = grad_y.data_ptr(), grad_x.data_ptr(), partial.data_ptr()
    library(PROGRAM).conv_backward(ctypes.byref(call))
    del kept
    return grad_x, torch.sum(partial, dim=0, out=grad_taps)


@conv_backward.register_fake
def _(
    grad_y: Tensor,  # noqa: ARG001 - the op's signature
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,  # noqa: ARG001
    document_ids: Tensor | None,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    return _grads(x, weight)


def _grads(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape[1] + 1, weight.shape[0])


def _call(
    x: Tensor, weight: Tensor, bias: Tensor | None, document_ids: Tensor | None
) -> tuple[_Conv, list[Tensor | None]]:
    """Return the job, and the tensors that it points to and the caller must keep alive."""
    x = x if x.stride(3) == 1 else x.contiguous()
    taps = weight.T.contiguous()
    bias = None if bias is None else bias.contiguous()
    ids = None if document_ids is None else document_ids.to(torch.int64).contiguous()
    rows, size, groups, width = x.shape
    call = _Conv(rows=rows, size=size, groups=groups, width=width, d_conv=len(taps))
    for name, tensor in {"x": x, "taps": taps, "bias": bias, "ids": ids}.items():
        setattr(call, name, None if tensor is None else tensor.data_ptr())
    call.x_strides = (_int64 * 3)(*x.stride()[:3])
    call.is_fp32, call.threads = int(x.dtype is torch.float32), torch.get_num_threads()
    return call, [x, taps, bias, ids]
