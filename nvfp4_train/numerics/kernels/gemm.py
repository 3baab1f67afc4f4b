"""The BF16 GEMM of the C++ twin: FP32 or BF16 output, on BF16 values or straight on codes."""

import ctypes
from functools import cache

import torch
from torch import Tensor

from nvfp4_train.numerics.kernels.loader import is_compiled, library
from nvfp4_train.numerics.kernels.native import Settings, settings_of
from nvfp4_train.numerics.spec import OperandSpec

_pointer = ctypes.c_void_p
_int64 = ctypes.c_int64
_int32 = ctypes.c_int32
_E2M1, _NO_SCALE = 0, 2  # see Settings


class _Side(ctypes.Structure):
    """Mirror of `struct Side` in gemm.cpp."""

    _fields_ = [
        *((name, _pointer) for name in ("data", "scales", "factors")),
        *((name, _int64) for name in ("rows", "stride", "scale_stride", "factor_stride")),
        *((name, _int32) for name in ("is_transposed", "element", "scale_kind")),
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
def gemm(
    a: list[Tensor],
    b: list[Tensor],
    alpha: Tensor,
    factors: list[Tensor | None],
    *,
    layouts: list[int],
    out_dtype: torch.dtype,
) -> Tensor:
    """Return alpha * a b^T [R_a, R_b], summed in FP32 in ascending order of the contraction and rounded once.

    The order does not depend on the other rows, the blocking or the number of threads. Subnormal BF16 inputs and
    FP32 sums count as zero, as they do for every program that uses these instructions. With factors, the sum of each
    128 elements of the contraction is multiplied by the product of its factors and added to the others, in FP32.

    Args:
        a: [values], bf16 [R, K] in any layout with one unit stride; or [codes, block_scale].
        b: The same.
        alpha: fp32, anything that expands to [R_a, R_b].
        factors: Of a and of b, fp32 [R, K/128] rounded up, or None.
        layouts: `layout_of_values` or `layout_of_codes` of a, then that of b.
        out_dtype: fp32 or bf16.
    """
    (side_a, depth), (side_b, _) = _side(a, layouts[:3]), _side(b, layouts[3:])
    along = [None if part is None else part.contiguous() for part in (factors[0], _transposed(factors[1]))]
    for side, part in zip((side_a, side_b), along, strict=True):
        if part is not None:
            side.factors, side.factor_stride = part.data_ptr(), part.stride(0)
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
    factors: list[Tensor | None],  # noqa: ARG001
    *,
    layouts: list[int],
    out_dtype: torch.dtype,
) -> Tensor:
    rows_a, rows_b = _rows(a, layouts[:3]), _rows(b, layouts[3:])
    return a[0].new_empty(rows_a, rows_b, dtype=out_dtype)


def layout_of_values() -> list[int]:
    """How the kernel reads bf16 values."""
    return [-1, _NO_SCALE, 0]


def layout_of_codes(spec: OperandSpec, *, is_transposed: bool) -> list[int]:
    """How the kernel reads codes: element kind, kind of scale, and whether they are those of the operand [K, R]."""
    settings = Settings(*settings_of(spec, column=False))
    return [settings.element, settings.scale_kind, int(is_transposed)]


def _rows(parts: list[Tensor], layout: list[int]) -> int:
    element, _, is_transposed = layout
    return parts[0].shape[1] * _codes_of_byte(element) if is_transposed else parts[0].shape[0]


def _codes_of_byte(element: int) -> int:
    return 2 if element == _E2M1 else 1


def _transposed(factors: Tensor | None) -> Tensor | None:
    return None if factors is None else factors.t()


def _side(parts: list[Tensor], layout: list[int]) -> tuple[_Side, int]:
    """One operand, and its K."""
    data, (element, scale_kind, is_transposed) = parts[0], layout
    side = _Side(data=data.data_ptr(), rows=_rows(parts, layout), element=element, scale_kind=scale_kind)
    if len(parts) == 1:
        is_column = data.stride(1) != 1
        side.stride, side.is_transposed = data.stride(int(is_column)), is_column
        return side, data.shape[1]
    scales = parts[1]
    side.stride, side.is_transposed = data.stride(0), is_transposed
    side.scales, side.scale_stride = scales.data_ptr(), scales.stride(0)
    return side, data.shape[0] if is_transposed else data.shape[1] * _codes_of_byte(element)
