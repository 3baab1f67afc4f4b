"""Calls into the C++ twin: tensors in, tensors out, as custom ops that torch.compile sees as opaque."""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from nvfp4_train.numerics.formats import BLOCK_LENGTH
from nvfp4_train.numerics.kernels.loader import library
from nvfp4_train.numerics.spec import (
    HADAMARD_SIGN_MASK,
    Block,
    GlobalScale,
    HadamardSigns,
    OperandSpec,
    Rounding,
    ScaleRule,
)

_SCALE_RULE = {ScaleRule.amax: 0, ScaleRule.four_over_six_mae: 1, ScaleRule.four_over_six_mse: 2}
_pointer = ctypes.c_void_p
_int64 = ctypes.c_int64


class Job(ctypes.Structure):
    """Mirror of `struct Job` in quantize.cpp."""

    _fields_ = [
        *((name, _pointer) for name in ("x", "amax", "codes", "scales", "operand")),
        *((name, _int64) for name in ("rows", "columns", "stride")),
        ("key", ctypes.c_uint64),
        *((name, _int64) for name in ("row_offset", "column_offset")),
        *(
            (name, ctypes.c_int32)
            for name in (
                "is_fp32", "amax_per_row", "tile", "stochastic", "hadamard", "sign_mask", "scale_rule",
                "block_scale_max", "threads",
            )
        ),
    ]  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """An OperandSpec, a direction and a random stream as integers, which is what a custom op can take."""

    column: int
    amax_per_row: int
    tile: int
    stochastic: int
    hadamard: int
    sign_mask: int
    scale_rule: int
    block_scale_max: int
    key: int  # signed
    row_offset: int
    column_offset: int

    @property
    def reads_transposed(self) -> bool:
        """Whether x must be transposed first: transforms run down columns only, special scale rules along rows only."""
        if self.hadamard:
            return not self.column
        return bool(self.column and (self.scale_rule or self.amax_per_row))

    @property
    def runs_down_columns(self) -> bool:
        """Direction of the kernel after that transposition."""
        return bool(self.column) != self.reads_transposed


def settings_of(
    spec: OperandSpec, *, column: bool, key: int = 0, row_offset: int = 0, column_offset: int = 0
) -> list[int]:
    """Return the settings of one call as a list, the form that custom ops take."""
    return [  # the fields of Settings, in order
        int(column),
        int(spec.global_scale is GlobalScale.row),
        int(spec.block is Block.tile_16x16),
        int(spec.rounding is Rounding.stochastic),
        int(spec.hadamard_size > 0),
        HADAMARD_SIGN_MASK[spec.hadamard_signs],
        _SCALE_RULE[spec.scale_rule],
        spec.block_scale_max,
        key - (1 << 64) if key >> 63 else key,
        row_offset,
        column_offset,
    ]


@torch.library.custom_op("nvfp4_train::amax", mutates_args=())
def amax_op(x: Tensor, settings: list[int]) -> Tensor:
    """Largest magnitude of x, or of each of the quantized matrix's rows."""
    chosen = Settings(*settings)
    x = _readable(x, chosen)
    out = torch.zeros(x.shape[0] if chosen.amax_per_row else 1)
    library().nvfp4_amax(ctypes.byref(_job(x, chosen)), _address(out))
    return out


@amax_op.register_fake
def _(x: Tensor, settings: list[int]) -> Tensor:
    chosen = Settings(*settings)
    rows = x.shape[1] if chosen.column else x.shape[0]
    return x.new_empty(rows if chosen.amax_per_row else 1, dtype=torch.float32)


@torch.library.custom_op("nvfp4_train::quantize", mutates_args=())
def quantize_op(x: Tensor, amax: Tensor, settings: list[int]) -> tuple[Tensor, Tensor]:
    """Packed codes and block scales."""
    chosen = Settings(*settings)
    rows, columns = x.shape[::-1] if chosen.column else x.shape
    x = _readable(x, chosen)
    padded_rows, padded_columns = x.shape[::-1] if chosen.runs_down_columns else x.shape
    codes = torch.empty(padded_rows, padded_columns // 2, dtype=torch.uint8)
    scales = torch.empty(padded_rows, padded_columns // BLOCK_LENGTH, dtype=torch.uint8)
    amax = amax.contiguous()
    job = _job(x, chosen)
    job.amax, job.codes, job.scales = amax.data_ptr(), codes.data_ptr(), scales.data_ptr()
    library().nvfp4_quantize(ctypes.byref(job), int(chosen.runs_down_columns))
    return codes[:rows, : columns // 2].contiguous(), scales


@quantize_op.register_fake
def _(x: Tensor, amax: Tensor, settings: list[int]) -> tuple[Tensor, Tensor]:  # noqa: ARG001 - the op's signature
    chosen = Settings(*settings)
    rows, columns = (x.shape[1], x.shape[0]) if chosen.column else (x.shape[0], x.shape[1])
    scale_rows = -(-rows // BLOCK_LENGTH) * BLOCK_LENGTH if chosen.tile else rows
    codes = x.new_empty(rows, columns // 2, dtype=torch.uint8)
    return codes, x.new_empty(scale_rows, -(-columns // BLOCK_LENGTH), dtype=torch.uint8)


@torch.library.custom_op("nvfp4_train::quantize_operand", mutates_args=())
def quantize_operand_op(x: Tensor, amax: Tensor, settings: list[int]) -> Tensor:
    """code * scale in BF16, without packing."""
    chosen = Settings(*settings)
    rows, columns = x.shape[::-1] if chosen.column else x.shape
    if chosen.scale_rule:
        codes, scales = quantize_op(x, amax, settings)
        return operand_op(codes, scales)
    x = _readable(x, chosen)
    out = torch.empty(x.shape[::-1] if chosen.runs_down_columns else x.shape, dtype=torch.bfloat16)
    amax = amax.contiguous()
    job = _job(x, chosen)
    job.amax, job.operand = amax.data_ptr(), out.data_ptr()
    library().nvfp4_quantize(ctypes.byref(job), int(chosen.runs_down_columns))
    return out[:rows, :columns].contiguous()


@quantize_operand_op.register_fake
def _(x: Tensor, amax: Tensor, settings: list[int]) -> Tensor:  # noqa: ARG001 - the op's signature
    rows, columns = (x.shape[1], x.shape[0]) if settings[0] else (x.shape[0], x.shape[1])
    return x.new_empty(rows, columns, dtype=torch.bfloat16)


@torch.library.custom_op("nvfp4_train::operand", mutates_args=())
def operand_op(codes: Tensor, scales: Tensor) -> Tensor:
    """Unpack codes [R, C/2] and multiply by their block scales, BF16 [R, C]."""
    codes, scales = codes.contiguous(), scales.contiguous()
    rows, columns = codes.shape[0], codes.shape[1] * 2
    out = torch.empty(rows, columns, dtype=torch.bfloat16)
    library().nvfp4_operand(
        _address(codes), _address(scales), _int64(rows), _int64(columns), _address(out), torch.get_num_threads()
    )
    return out


@operand_op.register_fake
def _(codes: Tensor, scales: Tensor) -> Tensor:  # noqa: ARG001 - the op's signature
    return codes.new_empty(codes.shape[0], codes.shape[1] * 2, dtype=torch.bfloat16)


def hadamard_transform(x: Tensor, signs: HadamardSigns) -> Tensor:
    """Transform groups of 16 along the last dim of x [..., C]; BF16."""
    columns = x.flatten(0, -2).t()  # the kernel runs down columns
    columns = (columns.float() if columns.dtype is torch.float16 else columns).contiguous()
    out = torch.empty(columns.shape[::-1], dtype=torch.bfloat16)
    job = Job(x=columns.data_ptr(), operand=out.data_ptr(), rows=columns.shape[0], columns=columns.shape[1])
    job.stride, job.is_fp32, job.threads = (
        columns.stride(0),
        int(columns.dtype is torch.float32),
        torch.get_num_threads(),
    )
    job.hadamard, job.sign_mask = 1, HADAMARD_SIGN_MASK[signs]
    library().nvfp4_hadamard(ctypes.byref(job))
    return out.view(x.shape)


def dequantize(codes: Tensor, scales: Tensor, amax: Tensor, block_scale_max: int) -> Tensor:
    """fp32 [R, C]."""
    codes, scales, amax = codes.contiguous(), scales.contiguous(), amax.contiguous()
    rows, columns = codes.shape[0], codes.shape[1] * 2
    out = torch.empty(rows, columns)
    inverse = ctypes.c_float(1.0 / (6.0 * block_scale_max))
    library().nvfp4_dequantize(
        *(_address(codes), _address(scales), _address(amax), int(amax.numel() > 1), inverse),
        *(_int64(rows), _int64(columns), _address(out), torch.get_num_threads()),
    )
    return out


def reference_gemm(codes_a: Tensor, scales_a: Tensor, codes_b: Tensor, scales_b: Tensor) -> Tensor:
    """Sum over blocks of scale products times code products, fp32 [R_a, R_b], before the global factor."""
    codes_a, scales_a, codes_b, scales_b = (part.contiguous() for part in (codes_a, scales_a, codes_b, scales_b))
    out = torch.empty(codes_a.shape[0], codes_b.shape[0])
    library().nvfp4_reference_gemm(
        *(_address(codes_a), _address(scales_a), _int64(codes_a.shape[0])),
        *(_address(codes_b), _address(scales_b), _int64(codes_b.shape[0])),
        *(_int64(codes_a.shape[1] * 2), _address(out), torch.get_num_threads()),
    )
    return out


def round_nearest_even(scaled: Tensor) -> Tensor:
    """Packed codes of fp32 elements [..., C], C even."""
    scaled = scaled.contiguous()
    packed = torch.empty(*scaled.shape[:-1], scaled.shape[-1] // 2, dtype=torch.uint8)
    library().nvfp4_round_nearest(_address(scaled), _int64(packed.numel()), _address(packed))
    return packed


def random_bytes(key: int, row_offset: int, column_offset: int, *, rows: int, columns: int) -> Tensor:
    """Bytes of a random stream, uint8 [rows, columns]."""
    out = torch.empty(rows, columns, dtype=torch.uint8)
    offsets = (_int64(row_offset), _int64(column_offset))
    library().nvfp4_random_bytes(ctypes.c_uint64(key), *offsets, _int64(rows), _int64(columns), _address(out))
    return out


def e2m1_values() -> Tensor:
    """The 16 values that codes stand for."""
    out = torch.empty(16)
    library().nvfp4_e2m1_values(_address(out))
    return out


def swizzle_scales(scales: Tensor) -> Tensor:
    """cuBLAS layout of 4-byte elements [R, C], whole atoms."""
    scales = scales.contiguous()
    out = torch.empty_like(scales)
    library().nvfp4_swizzle(_address(scales), _int64(scales.shape[0]), _int64(scales.shape[1]), _address(out))
    return out


def _readable(x: Tensor, settings: Settings) -> Tensor:
    """x as the kernel reads it: BF16 or FP32, transposed if asked, padded to whole blocks, unit stride along rows."""
    x = x.float() if x.dtype is torch.float16 else x
    x = x.t() if settings.reads_transposed else x
    row_padding, column_padding = -x.shape[0] % BLOCK_LENGTH, -x.shape[1] % BLOCK_LENGTH
    if not settings.tile:
        row_padding, column_padding = (row_padding, 0) if settings.runs_down_columns else (0, column_padding)
    if row_padding or column_padding:
        x = pad(x, (0, column_padding, 0, row_padding))
    return x if x.stride(1) == 1 else x.contiguous()


def _job(x: Tensor, settings: Settings) -> Job:
    job = Job(x=x.data_ptr(), rows=x.shape[0], columns=x.shape[1], stride=x.stride(0), key=settings.key & (1 << 64) - 1)
    job.row_offset, job.column_offset = settings.row_offset, settings.column_offset
    job.is_fp32, job.amax_per_row = int(x.dtype is torch.float32), settings.amax_per_row
    job.tile, job.stochastic = settings.tile, settings.stochastic
    job.hadamard, job.sign_mask = settings.hadamard, settings.sign_mask
    job.scale_rule, job.block_scale_max = settings.scale_rule, settings.block_scale_max
    job.threads = torch.get_num_threads()
    return job


def _address(tensor: Tensor) -> ctypes.c_void_p:
    return _pointer(tensor.data_ptr())
