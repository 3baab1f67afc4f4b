"""Calls into the kernels of squared ReLU and cross-entropy, as custom ops that torch.compile sees as opaque."""

import ctypes

import torch
from torch import Tensor

from nvfp4_train.model.kernels.program import PROGRAM
from nvfp4_train.numerics.kernels.loader import library

_pointer, _int64, _int32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class _Entropy(ctypes.Structure):
    """Mirror of `struct Entropy` in pointwise.cpp."""

    _fields_ = [
        *((name, _pointer) for name in ("logits", "labels", "log_sums", "losses", "grad_loss", "grad_logits")),
        *((name, _int64) for name in ("tokens", "vocabulary", "stride", "grad_stride")),
        *((name, _int32) for name in ("is_fp32", "threads")),
    ]


@torch.library.custom_op("nvfp4_train::squared_relu", mutates_args=())
def squared_relu_forward(x: Tensor) -> Tensor:
    """max(x, 0)^2."""
    x, y = x.contiguous(), x.new_empty(x.shape)
    library(PROGRAM).squared_relu_forward(*_addresses(x, y), *_size(x))
    return y


@squared_relu_forward.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("nvfp4_train::squared_relu_backward", mutates_args=())
def squared_relu_backward(grad_y: Tensor, x: Tensor) -> Tensor:
    """2 max(x, 0) grad_y."""
    grad_y, x, grad_x = grad_y.contiguous(), x.contiguous(), x.new_empty(x.shape)
    library(PROGRAM).squared_relu_backward(*_addresses(x, grad_y, grad_x), *_size(x))
    return grad_x


@squared_relu_backward.register_fake
def _(grad_y: Tensor, x: Tensor) -> Tensor:  # noqa: ARG001 - the op's signature
    return x.new_empty(x.shape)


@torch.library.custom_op("nvfp4_train::cross_entropy", mutates_args=())
def cross_entropy_forward(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each token, zero for negative labels, and the log of its sum of exponentials, fp32 [T] each.

    Raises:
        IndexError: for a label beyond the vocabulary.
    """
    if labels.numel() and int(labels.max()) >= logits.shape[1]:
        raise IndexError(f"labels: found {int(labels.max())}, the vocabulary has {logits.shape[1]} tokens")
    losses, log_sums = _per_token(logits)
    call, kept = _entropy(logits, labels, log_sums)
    call.losses = losses.data_ptr()
    library(PROGRAM).entropy_forward(ctypes.byref(call))
    del kept  # alive until here
    return losses, log_sums


@cross_entropy_forward.register_fake
def _(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001 - the op's signature
    return _per_token(logits)


@torch.library.custom_op("nvfp4_train::cross_entropy_backward", mutates_args=("grad_logits",))
def cross_entropy_backward(
    grad_loss: Tensor, logits: Tensor, labels: Tensor, log_sums: Tensor, grad_logits: Tensor
) -> None:
    """Write the gradient of the logits, from that of the sum of the losses, fp32 []; the logits may be the place."""
    grad_loss = grad_loss.to(torch.float32)
    call, kept = _entropy(logits, labels, log_sums)
    call.grad_loss, call.grad_logits, call.grad_stride = (
        grad_loss.data_ptr(),
        grad_logits.data_ptr(),
        grad_logits.stride(0),
    )
    library(PROGRAM).entropy_backward(ctypes.byref(call))
    del kept  # alive until here


def _per_token(logits: Tensor) -> tuple[Tensor, Tensor]:
    size = logits.shape[0]
    return logits.new_empty(size, dtype=torch.float32), logits.new_empty(size, dtype=torch.float32)


def _entropy(logits: Tensor, labels: Tensor, log_sums: Tensor) -> tuple[_Entropy, list[Tensor]]:
    """Return the job, and the tensors that it points to and the caller must keep alive."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    labels = labels.contiguous()
    call = _Entropy(tokens=logits.shape[0], vocabulary=logits.shape[1], stride=logits.stride(0))
    call.logits, call.labels, call.log_sums = logits.data_ptr(), labels.data_ptr(), log_sums.data_ptr()
    call.is_fp32, call.threads = int(logits.dtype is torch.float32), torch.get_num_threads()
    return call, [logits, labels]


def _addresses(*tensors: Tensor) -> list[ctypes.c_void_p]:
    return [_pointer(tensor.data_ptr()) for tensor in tensors]


def _size(x: Tensor) -> tuple[ctypes.c_int64, ctypes.c_int32, ctypes.c_int32]:
    return _int64(x.numel()), _int32(x.dtype is torch.float32), _int32(torch.get_num_threads())
