"""Calls into the scan kernels, as custom ops that torch.compile sees as opaque."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nvfp4_train.model.kernels.program import PROGRAM
from nvfp4_train.numerics.kernels.loader import library

_pointer, _int64, _int32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_VECTOR = 16


class _Scan(ctypes.Structure):
    """Mirror of `struct Scan` in scan.cpp."""

    _fields_ = [
        *(
            (name, _pointer)
            for name in (
                "x", "b", "c", "dt", "bias", "a_log", "skip", "ids", "initial", "y", "states", "steps", "sums",
                "decays", "grad_y", "grad_states", "grad_decays", "grad_initial", "grad_x", "grad_b", "grad_c",
                "grad_dt", "grad_bias", "grad_a_log", "grad_skip",
            )
        ),
        *((name, _int64) for name in ("rows", "size", "chunk", "groups", "heads", "width", "depth")),
        *((f"{name}_strides", _int64 * 3) for name in ("x", "b", "c", "dt")),
        *((name, ctypes.c_float) for name in ("dt_min", "dt_max")),
        *((name, _int32) for name in ("is_fp32", "threads")),
    ]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SelectiveScan:
    """Arguments of ``selective_scan`` that are no activations.

    Args:
        document_ids: [B, S] int.
        chunk_size: Tokens per chunk.
        dt_min: Time steps are not smaller.
        dt_max: Nor larger.
    """

    document_ids: Tensor
    chunk_size: int
    dt_min: float
    dt_max: float


def selective_scan(
    activations: Sequence[Tensor], scalars: Sequence[Tensor], settings: SelectiveScan, *, initial_state: Tensor | None
) -> Tensor:
    """Run ``Scan.forward`` as two passes over the chunks of a sequence.

    Args:
        activations: x [B, S, G, R, P], b and c [B, S, G, N], dt [B, S, G, R] of one dtype, FP32 or BF16.
        scalars: dt_bias, A_log and D, fp32 [G * R] each.
        settings: The rest.
        initial_state: [B, G, R, N, P] FP32, or None.

    Returns:
        [B, S, G, R, P] in the dtype of x.
    """
    return _SelectiveScan.apply(settings, initial_state, *activations, *scalars)


class _SelectiveScan(torch.autograd.Function):
    """Keeps its inputs and the state at the start of each chunk; everything within a chunk is computed again."""

    @staticmethod
    def forward(ctx: Any, settings: SelectiveScan, initial_state: Tensor | None, *tensors: Tensor) -> Tensor:
        ids, initial = settings.document_ids, initial_state
        numbers = [float(settings.chunk_size), settings.dt_min, settings.dt_max]
        y, *kept = torch.ops.nvfp4_train.scan_forward(list(tensors), ids, initial, numbers)
        ctx.save_for_backward(*tensors, ids, initial, *kept)
        ctx.numbers = numbers
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, ids, initial, states, steps, sums, decays = ctx.saved_tensors
        kept = [ids, states, steps, sums, decays]
        grads = torch.ops.nvfp4_train.scan_backward(grad_y.contiguous(), tensors, kept, initial, ctx.numbers)
        *grads, of_scalars, grad_initial = grads
        return None, grad_initial if ctx.needs_input_grad[1] else None, *grads, *of_scalars.unbind()


@torch.library.custom_op("nvfp4_train::scan_forward", mutates_args=())
def scan_forward(
    tensors: list[Tensor], ids: Tensor, initial: Tensor | None, numbers: list[float]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y, the state at the start of each chunk, time steps, sums of log-decays, and decays of chunks."""
    results = _results(tensors[0], tensors[1], int(numbers[0]))
    call, kept = _call(tensors, ids, initial, numbers)
    for name, tensor in zip(("y", "states", "steps", "sums", "decays"), results, strict=True):
        setattr(call, name, tensor.data_ptr())
    library(PROGRAM).scan_forward(ctypes.byref(call))
    del kept  # alive until here
    return results


@scan_forward.register_fake
def _(
    tensors: list[Tensor],
    ids: Tensor,  # noqa: ARG001 - the op's signature
    initial: Tensor | None,  # noqa: ARG001
    numbers: list[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _results(tensors[0], tensors[1], int(numbers[0]))


@torch.library.custom_op("nvfp4_train::scan_backward", mutates_args=())
def scan_backward(
    grad_y: Tensor, tensors: list[Tensor], kept: list[Tensor], initial: Tensor | None, numbers: list[float]
) -> list[Tensor]:
    """Gradients of the activations, of the scalars (stacked), and of the initial state."""
    ids, states, steps, sums, decays = kept
    call, pointed_to = _call(tensors, ids, initial, numbers)
    grad_states, grad_decays = torch.empty_like(states), torch.empty_like(decays)
    grads = _grads(tensors, states)
    partial = torch.empty(3, *decays.shape)
    grad_initial = grads[-1]
    inputs = {"states": states, "steps": steps, "sums": sums, "decays": decays, "grad_y": grad_y}
    outputs = {"grad_states": grad_states, "grad_decays": grad_decays, "grad_initial": grad_initial}
    outputs |= dict(zip(("grad_x", "grad_b", "grad_c", "grad_dt"), grads, strict=False))
    outputs |= dict(zip(("grad_bias", "grad_a_log", "grad_skip"), partial, strict=True))
    for name, tensor in (inputs | outputs).items():
        setattr(call, name, tensor.data_ptr())
    library(PROGRAM).scan_backward(ctypes.byref(call))
    del pointed_to  # alive until here
    return [*grads[:4], partial.flatten(1, 2).sum(dim=1).flatten(1), grad_initial]


@scan_backward.register_fake
def _(
    grad_y: Tensor,  # noqa: ARG001 - the op's signature
    tensors: list[Tensor],
    kept: list[Tensor],
    initial: Tensor | None,  # noqa: ARG001
    numbers: list[float],  # noqa: ARG001
) -> list[Tensor]:
    grads = _grads(tensors, kept[1])
    return [*grads[:4], tensors[4].new_empty(3, *tensors[4].shape), grads[-1]]


def _results(x: Tensor, b: Tensor, chunk: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows, size, groups, heads, width = x.shape
    chunk = min(chunk, size)
    chunks = -(-size // chunk)
    by_head = (rows, chunks, groups, heads)
    tokens = -(-chunk // _VECTOR) * _VECTOR
    return (
        x.new_empty(x.shape),
        x.new_empty(*by_head, b.shape[-1], width),
        x.new_empty(*by_head, tokens, dtype=torch.float32),
        x.new_empty(*by_head, 2, tokens, dtype=torch.float32),
        x.new_empty(by_head, dtype=torch.float32),
    )


def _grads(tensors: list[Tensor], states: Tensor) -> list[Tensor]:
    """Memory for the gradients of x, b, c, dt and of the initial state."""
    rows, _, *shape = states.shape
    return [
        *(tensor.new_empty(tensor.shape) for tensor in tensors[:4]),
        states.new_empty(rows, *shape, dtype=torch.float32),
    ]


def _readable(tensor: Tensor) -> Tensor:
    """What follows the groups lies together."""
    if tensor.ndim < 4:
        return tensor.contiguous()
    inner = tensor[0, 0, 0]
    return tensor if inner.is_contiguous() else tensor.contiguous()


def _call(
    tensors: list[Tensor], ids: Tensor, initial: Tensor | None, numbers: list[float]
) -> tuple[_Scan, dict[str, Tensor]]:
    """Return the job, and the tensors that it points to and the caller must keep alive."""
    names = ("x", "b", "c", "dt", "bias", "a_log", "skip")
    named = dict(zip(names, map(_readable, tensors), strict=True))
    named["ids"] = ids.to(torch.int64).contiguous()
    if initial is not None:
        named["initial"] = initial.to(torch.float32).contiguous()
    rows, size, groups, heads, width = named["x"].shape
    call = _Scan(rows=rows, size=size, groups=groups, heads=heads, width=width, depth=named["b"].shape[-1])
    for name, tensor in named.items():
        setattr(call, name, tensor.data_ptr())
    for name in ("x", "b", "c", "dt"):
        setattr(call, f"{name}_strides", (_int64 * 3)(*named[name].stride()[:3]))
    call.chunk, call.dt_min, call.dt_max = min(int(numbers[0]), size), numbers[1], numbers[2]
    call.is_fp32, call.threads = int(named["x"].dtype is torch.float32), torch.get_num_threads()
    return call, named
