"""The BF16 GEMM of the C++ twin: FP32 or BF16 output, on BF16 values or straight on packed codes."""

import ctypes
from functools import cache

import torch
from torch import Tensor

from nvfp4_train.numerics.kernels.loader import is_compiled, library

_pointer = ctypes.c_void_p
_int64 = ctypes.c_int64
_int32 = ctypes.c_int32


class _Side(ctypes.Structure):
    """Mirror of `struct Side` in gemm.cpp."""

    _fields_ = [
        *((name, _pointer) for name in ("data", "scales")),
        *((name, _int64) for name in ("rows", "stride", "scale_stride")),
        ("is_transposed", _int32),
    ]


class _Gemm(ctypes.Structure):
    """Mirror of `struct Gemm` in gemm.cpp."""

    _fields_ = [
        *((name, _Side) for name in ("a", "b")),
        ("depth", _int64),
        ("alpha", _pointer),
        *((name, _int64) for name in ("alpha_row_stride", "alpha_column_stride")),
        ("out", _pointer),
        *((name, _int32) for name in ("is_fp32", "threads")),
    ]


def multiplies(x: Tensor) -> bool:
    """Say whether `gemm` handles x: compiled kernels on a CPU that has AVX-512 BF16 but not the faster AMX."""
    return is_compiled(x) and _has_instructions()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_instructions() -> bool:
    return _probe()


@cache
def _probe() -> bool:
    return bool(library().nvfp4_has_gemm()) and not torch.cpu._is_amx_tile_supported()


@torch.library.custom_op("nvfp4_train::gemm", mutates_args=())
def gemm(a: list[Tensor], b: list[Tensor], alpha: Tensor, *, transposed: list[bool], out_dtype: torch.dtype) -> Tensor:
    """Return alpha * a b^T [R_a, R_b], summed in FP32 in ascending order of the contraction and rounded once.

    The order does not depend on the other rows, the blocking or the number of threads. Subnormal BF16 inputs and
    FP32 sums count as zero, as they do for every program that uses these instructions.

    Args:
        a: [values], bf16 [R, K] in any layout with one unit stride; or [codes, block_scale]: packed E2M1 codes with
            E4M3 scales of blocks of 16.
        b: The same.
        alpha: fp32, anything that expands to [R_a, R_b].
        transposed: Whether the codes of a, of b, are those of the transposed operand [K, R]; false for values.
        out_dtype: fp32 or bf16.
    """
    (side_a, depth), (side_b, _) = _side(a, transposed[0]), _side(b, transposed[1])
    alpha = alpha.expand(side_a.rows, side_b.rows)
    row_stride, column_stride = alpha.stride()
    out = torch.empty(side_a.rows, side_b.rows, dtype=out_dtype)
    call = _Gemm(a=side_a, b=side_b, depth=depth, alpha=alpha.data_ptr(), out=out.data_ptr())
    call.alpha_row_stride, call.alpha_column_stride = row_stride, column_stride
    call.is_fp32, call.threads = int(out_dtype is torch.float32), torch.get_num_threads()
    library().nvfp4_gemm(ctypes.byref(call))
    return out


@gemm.register_fake
def _(
    a: list[Tensor],
    b: list[Tensor],
    alpha: Tensor,  # noqa: ARG001 - the op's signature
    *,
    transposed: list[bool],
    out_dtype: torch.dtype,
) -> Tensor:
    rows_a, rows_b = (_rows(parts, flipped) for parts, flipped in zip((a, b), transposed, strict=True))
    return a[0].new_empty(rows_a, rows_b, dtype=out_dtype)


def _rows(parts: list[Tensor], transposed: bool) -> int:  # noqa: FBT001 - an element of the op's list
    return parts[0].shape[1] * 2 if transposed else parts[0].shape[0]


def _side(parts: list[Tensor], transposed: bool) -> tuple[_Side, int]:  # noqa: FBT001 - an element of the op's list
    """One operand, and its K."""
    data = parts[0]
    if len(parts) == 1:
        is_column = data.stride(1) != 1
        side = _Side(data=data.data_ptr(), rows=data.shape[0], stride=data.stride(int(is_column)))
        side.is_transposed = is_column
        return side, data.shape[1]
    scales = parts[1]
    side = _Side(data=data.data_ptr(), scales=scales.data_ptr(), stride=data.stride(0), scale_stride=scales.stride(0))
    side.rows, side.is_transposed = _rows(parts, transposed), transposed
    return side, data.shape[0] if transposed else data.shape[1] * 2
