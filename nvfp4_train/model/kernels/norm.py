"""Calls into the norm kernels, as custom ops that torch.compile sees as opaque."""

import ctypes

import torch
from torch import Tensor

from nvfp4_train.model.kernels.program import PROGRAM
from nvfp4_train.numerics.kernels.loader import library

_pointer, _int64, _int32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_BLOCK = 64  # kBlock in norm.cpp


class _Norm(ctypes.Structure):
    """Mirror of `struct Norm` in norm.cpp."""

    _fields_ = [
        *(
            (name, _pointer)
            for name in ("x", "gate", "weight", "y", "inverse", "grad_y", "grad_x", "grad_gate", "grad_weight")
        ),
        *((name, _int64) for name in ("tokens", "norms", "pieces", "width")),
        *((f"{name}_strides", _int64 * 2) for name in ("x", "gate")),
        ("eps", ctypes.c_float),
        *((name, _int32) for name in ("is_fp32", "threads")),
    ]


@torch.library.custom_op("nvfp4_train::norm_forward", mutates_args=())
def norm_forward(
    x: Tensor, gate: Tensor | None, weight: Tensor, *, group_width: int, eps: float
) -> tuple[Tensor, Tensor]:
    """Normalize ``x``, or ``x * silu(gate)``.

    Args:
        x: [..., width], or its channels in groups [..., G, width / G].
        gate: The same shape and dtype, or None.
        weight: fp32 [width].
        group_width: Channels that share one mean square.
        eps: Added to the mean square.

    Returns:
        y in the shape and dtype of x, and the inverse root mean squares, fp32 [tokens, width / group_width].
    """
    y, inverse = _results(x, weight, group_width)
    call, kept = _call(x, gate, weight, inverse, group_width=group_width)
    call.y, call.eps = y.data_ptr(), eps
    library(PROGRAM).norm_forward(ctypes.byref(call))
    del kept  # alive until here
    return y, inverse


@norm_forward.register_fake
def _(
    x: Tensor,
    gate: Tensor | None,  # noqa: ARG001 - the op's signature
    weight: Tensor,
    *,
    group_width: int,
    eps: float,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    return _results(x, weight, group_width)


@torch.library.custom_op("nvfp4_train::norm_backward", mutates_args=())
def norm_backward(
    grad_y: Tensor, x: Tensor, gate: Tensor | None, weight: Tensor, inverse: Tensor, *, group_width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, of the gate (empty without one) and of the weight."""
    grad_y = grad_y.contiguous()
    grad_x, grad_gate, grad_weight = _grads(x, gate, weight)
    call, kept = _call(x, gate, weight, inverse, group_width=group_width)
    partial = grad_weight.new_empty(-(-call.tokens // _BLOCK), len(weight))
    tensors = {"grad_y": grad_y, "grad_x": grad_x, "grad_gate": grad_gate, "grad_weight": partial}
    for name, tensor in tensors.items():
        setattr(call, name, tensor.data_ptr())
    library(PROGRAM).norm_backward(ctypes.byref(call))
    del kept
    return grad_x, grad_gate, torch.sum(partial, dim=0, out=grad_weight)


@norm_backward.register_fake
def _(
    grad_y: Tensor,  # noqa: ARG001 - the op's signature
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    inverse: Tensor,  # noqa: ARG001
    *,
    group_width: int,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor]:
    return _grads(x, gate, weight)


def _results(x: Tensor, weight: Tensor, group_width: int) -> tuple[Tensor, Tensor]:
    width = weight.shape[0]
    return x.new_empty(x.shape), weight.new_empty(x.numel() // width, width // group_width)


def _grads(x: Tensor, gate: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(0 if gate is None else x.shape), torch.empty_like(weight)


def _call(
    x: Tensor, gate: Tensor | None, weight: Tensor, inverse: Tensor, *, group_width: int
) -> tuple[_Norm, list[Tensor]]:
    """Return the job, and the tensors that it points to and the caller must keep alive."""
    piece = min(x.shape[-1], group_width)
    x, weight = _pieces(x, piece=piece, width=len(weight)), weight.contiguous()
    tokens, width = len(x), len(weight)
    call = _Norm(tokens=tokens, norms=width // group_width, pieces=group_width // piece, width=piece)
    call.x, call.weight, call.inverse = x.data_ptr(), weight.data_ptr(), inverse.data_ptr()
    call.x_strides = (_int64 * 2)(*x.stride()[:2])
    kept = [x, weight]
    if gate is not None:
        gate = _pieces(gate, piece=piece, width=width)
        call.gate, call.gate_strides = gate.data_ptr(), (_int64 * 2)(*gate.stride()[:2])
        kept.append(gate)
    call.is_fp32, call.threads = int(x.dtype is torch.float32), torch.get_num_threads()
    return call, kept


def _pieces(x: Tensor, *, piece: int, width: int) -> Tensor:
    """View channels as [tokens, pieces, piece]; copies only what has no such strides."""
    pieces = x.reshape(-1, width // piece, piece)
    return pieces if pieces.stride(2) == 1 else pieces.contiguous()
