"""Calls into the C++ twin: tensors in, tensors out, as custom ops that torch.compile sees as opaque."""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from nvfp4_train.numerics.kernels.loader import library
from nvfp4_train.numerics.random import RandomStream
from nvfp4_train.numerics.spec import CHUNK, FP8_FORMATS, Format, GlobalScale, OperandSpec, Rounding, ScaleRule

_E4M3_FORMATS = (Format.mxfp8_e4m3, Format.fp8_e4m3)
_E5M2_FORMATS = (Format.mxfp8_e5m2, Format.fp8_e5m2)
_SCALE_RULE = {
    ScaleRule.amax: 0,
    ScaleRule.clip_safe: 0,  # differs in a factor only
    ScaleRule.four_over_six_mae: 1,
    ScaleRule.four_over_six_mse: 2,
    ScaleRule.floor: 3,
}
_OUTER = {GlobalScale.none: 0, GlobalScale.tensor: 1, GlobalScale.row: 2, GlobalScale.block_128: 3}
_LARGEST = (6, 448, 57344)  # element of each element kind
_FP32_MAX = torch.finfo(torch.float32).max
_pointer = ctypes.c_void_p
_int64 = ctypes.c_int64


# Of a RandomStream and of the structures here, in this order.
STREAM_PLACES = ("row_offset", "row_segment", "row_stride", "column_offset", "column_segment", "column_stride")


class Job(ctypes.Structure):
    """Mirror of `struct Job` in lanes.h."""

    _fields_ = [
        *((name, _pointer) for name in ("x", "amax", "codes", "scales", "operand")),
        *((name, _int64) for name in ("rows", "columns", "stride", "amax_stride")),
        ("key", ctypes.c_uint64),
        *((name, _int64) for name in STREAM_PLACES),
        ("signs", ctypes.c_uint64 * 2),
        *((name, ctypes.c_float) for name in ("largest_product", "smallest_amax", "reciprocal")),
        *(
            (name, ctypes.c_int32)
            for name in (
                "is_fp32", "element", "scale_kind", "width", "is_tile", "outer", "stochastic", "hadamard", "scale_rule",
                "threads",
            )
        ),
    ]  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """An OperandSpec, a direction, signs and a random stream as integers, which is what a custom op can take.

    Args:
        column: Whether x^T is quantized.
        element: 0 E2M1, 1 E4M3, 2 E5M2.
        scale_kind: Block scales: 0 E4M3, 1 E8M0, 2 none.
        is_tile: Whether a scale covers as many rows as columns.
        outer: FP32 scales: 0 none, 1 of the tensor, 2 of rows, 3 of chunks of 128.
        stochastic: Whether elements are rounded so.
        hadamard: Size of the transform, or 0.
        scale_rule: Number of the rule, see _SCALE_RULE.
        is_clip_safe: Whether block maxima are mapped to 6 * 16/17.
        block_scale_max: See OperandSpec.
        signs_low: Bits of the transform's signs.
        signs_high: More of them.
        key: Of the random stream; like all 64-bit integers here, signed.
        row_offset: Of the random stream, as what follows.
        row_segment: Rows in a row; 0 is all.
        row_stride: From one segment to the next.
        column_offset: Of the columns, as above.
        column_segment: Of the columns.
        column_stride: Of the columns.
    """

    column: int
    element: int
    scale_kind: int
    is_tile: int
    outer: int
    stochastic: int
    hadamard: int
    scale_rule: int
    is_clip_safe: int
    block_scale_max: int
    signs_low: int
    signs_high: int
    key: int
    row_offset: int
    row_segment: int
    row_stride: int
    column_offset: int
    column_segment: int
    column_stride: int

    @property
    def is_packed(self) -> bool:
        """Whether two codes share a byte."""
        return self.element == 0

    @property
    def width(self) -> int:
        """Columns of a block, and what dims are padded to."""
        return 16 if self.scale_kind == 0 else 32

    @property
    def has_scales(self) -> bool:
        """Whether there are block scales."""
        return self.scale_kind != 2

    @property
    def tries_scales(self) -> bool:
        """Whether the scale rule tries several scales for a block."""
        return self.scale_rule in (1, 2)

    @property
    def reads_transposed(self) -> bool:
        """Whether x must be transposed first: transforms run down columns only, special scale rules along rows only."""
        return not self.column if self.hadamard else bool(self.column and self.tries_scales)

    @property
    def runs_down_columns(self) -> bool:
        """Direction of the kernel after that transposition."""
        return bool(self.column) != self.reads_transposed

    @property
    def largest_product(self) -> int:
        """What an FP32 scale's amax is mapped to."""
        return _LARGEST[self.element] * (self.block_scale_max if self.scale_kind == 0 else 1)

    def shape_of_scales(self, rows: int, columns: int) -> tuple[int, int]:
        """Shape of the block scales of a quantized matrix, with whole blocks."""
        if not self.has_scales:
            return rows, 0
        padded_rows = -(-rows // self.width) * self.width if self.is_tile else rows
        return padded_rows, -(-columns // self.width)


def settings_of(
    spec: OperandSpec, *, column: bool, sign_mask: int = 0, stream: RandomStream | None = None
) -> list[int]:
    """Return the settings of one call as a list, the form that custom ops take."""
    stream = stream or RandomStream(0)
    return [  # the fields of Settings, in order
        int(column),
        1 if spec.format in _E4M3_FORMATS else 2 if spec.format in _E5M2_FORMATS else 0,
        0 if spec.format is Format.nvfp4 else 2 if spec.format in FP8_FORMATS else 1,
        int(spec.is_tile),
        _OUTER[spec.fp32_scale],
        int(spec.rounding is Rounding.stochastic),
        spec.hadamard_size,
        _SCALE_RULE[spec.scale_rule],
        int(spec.scale_rule is ScaleRule.clip_safe),
        spec.block_scale_max,
        _signed(sign_mask & (1 << 64) - 1),
        _signed(sign_mask >> 64),
        _signed(stream.key),
        *(getattr(stream, name) for name in STREAM_PLACES),
    ]


@torch.library.custom_op("nvfp4_train::amax", mutates_args=())
def amax_op(x: Tensor, settings: list[int]) -> Tensor:
    """Largest magnitudes: of x, or of each of the quantized matrix's rows or chunks."""
    chosen = Settings(*settings)
    x = x.float() if x.dtype is torch.float16 else x
    transposes = chosen.reads_transposed if chosen.hadamard else bool(chosen.column and chosen.outer == 2)
    x = x.t() if transposes else x
    x = x if x.stride(1) == 1 else x.contiguous()
    runs_down_columns = bool(chosen.column) != transposes
    rows, columns = x.shape[::-1] if runs_down_columns else x.shape
    out = torch.zeros(_shape_of_amax(rows, columns, chosen))
    if out.numel():
        job = _job(x, chosen)
        job.amax_stride = out.stride(0)
        library().nvfp4_amax(ctypes.byref(job), int(runs_down_columns), _address(out))
    return out


@amax_op.register_fake
def _(x: Tensor, settings: list[int]) -> Tensor:
    chosen = Settings(*settings)
    rows, columns = (x.shape[1], x.shape[0]) if chosen.column else (x.shape[0], x.shape[1])
    return x.new_empty(_shape_of_amax(rows, columns, chosen), dtype=torch.float32)


@torch.library.custom_op("nvfp4_train::quantize", mutates_args=())
def quantize_op(x: Tensor, amax: Tensor, settings: list[int]) -> tuple[Tensor, Tensor]:
    """Codes and block scales."""
    chosen = Settings(*settings)
    rows, columns = x.shape[::-1] if chosen.column else x.shape
    x = _readable(x, chosen)
    padded_rows, padded_columns = x.shape[::-1] if chosen.runs_down_columns else x.shape
    per_byte = 2 if chosen.is_packed else 1
    codes = torch.empty(padded_rows, padded_columns // per_byte, dtype=torch.uint8)
    scales = torch.empty(chosen.shape_of_scales(padded_rows, padded_columns), dtype=torch.uint8)
    amax = _readable_amax(amax, padded_rows, chosen)
    job = _job(x, chosen, amax)
    job.codes, job.scales = codes.data_ptr(), scales.data_ptr()
    library().nvfp4_quantize(ctypes.byref(job), int(chosen.runs_down_columns))
    return codes[:rows, : columns // per_byte].contiguous(), scales[: chosen.shape_of_scales(rows, columns)[0]]


@quantize_op.register_fake
def _(x: Tensor, amax: Tensor, settings: list[int]) -> tuple[Tensor, Tensor]:  # noqa: ARG001 - the op's signature
    chosen = Settings(*settings)
    rows, columns = (x.shape[1], x.shape[0]) if chosen.column else (x.shape[0], x.shape[1])
    codes = x.new_empty(rows, columns // 2 if chosen.is_packed else columns, dtype=torch.uint8)
    return codes, x.new_empty(chosen.shape_of_scales(rows, columns), dtype=torch.uint8)


@torch.library.custom_op("nvfp4_train::amax_both", mutates_args=())
def amax_both_op(x: Tensor, along_rows: list[int], down_columns: list[int]) -> tuple[Tensor, Tensor]:
    """Largest magnitude of x and, after the second settings' transform, of x^T: fp32 [1] each, in one pass."""
    out = torch.empty(2)
    jobs = [_job(x, Settings(*settings)) for settings in (along_rows, down_columns)]
    library().nvfp4_amax_both(ctypes.byref(jobs[0]), ctypes.byref(jobs[1]), _address(out))
    return out[:1].clone(), out[1:].clone()  # each is kept as long as its codes are


@amax_both_op.register_fake
def _(x: Tensor, along_rows: list[int], down_columns: list[int]) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return x.new_empty(1, dtype=torch.float32), x.new_empty(1, dtype=torch.float32)


@torch.library.custom_op("nvfp4_train::quantize_both", mutates_args=())
def quantize_both_op(
    x: Tensor, amax_row: Tensor, amax_column: Tensor, along_rows: list[int], down_columns: list[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes and scales of x, then of x^T, in one pass; all dims are whole blocks, see `fits_one_pass`."""
    jobs, results = [], []
    for amax, settings in ((amax_row, Settings(*along_rows)), (amax_column, Settings(*down_columns))):
        rows, columns = x.shape[::-1] if settings.column else x.shape
        codes = torch.empty(rows, columns // (2 if settings.is_packed else 1), dtype=torch.uint8)
        scales = torch.empty(settings.shape_of_scales(rows, columns), dtype=torch.uint8)
        job = _job(x, settings, amax)
        job.codes, job.scales = codes.data_ptr(), scales.data_ptr()
        jobs.append(job)
        results += [codes, scales]
    library().nvfp4_quantize_both(ctypes.byref(jobs[0]), ctypes.byref(jobs[1]))
    return results[0], results[1], results[2], results[3]


@quantize_both_op.register_fake
def _(
    x: Tensor,
    amax_row: Tensor,  # noqa: ARG001 - the op's signature
    amax_column: Tensor,  # noqa: ARG001
    along_rows: list[int],
    down_columns: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    parts = []
    for settings in (Settings(*along_rows), Settings(*down_columns)):
        rows, columns = (x.shape[1], x.shape[0]) if settings.column else (x.shape[0], x.shape[1])
        parts.append(x.new_empty(rows, columns // 2 if settings.is_packed else columns, dtype=torch.uint8))
        parts.append(x.new_empty(settings.shape_of_scales(rows, columns), dtype=torch.uint8))
    return parts[0], parts[1], parts[2], parts[3]


def fits_one_pass(x: Tensor, along_rows: list[int], down_columns: list[int]) -> bool:
    """Say whether `quantize_both_op` can do two jobs: no padding, no transposition, FP32 scales of the whole tensor."""
    row, column = Settings(*along_rows), Settings(*down_columns)
    if x.dtype not in (torch.float32, torch.bfloat16) or x.stride(1) != 1 or x.numel() == 0:
        return False
    if row.hadamard or row.column or not column.column or row.outer > 1 or column.outer > 1:
        return False
    if row.tries_scales or column.tries_scales:
        return False
    multiple = max(row.width, column.width, column.hadamard)
    return x.shape[0] % multiple == 0 and x.shape[1] % multiple == 0


@torch.library.custom_op("nvfp4_train::quantize_operand", mutates_args=())
def quantize_operand_op(x: Tensor, amax: Tensor, settings: list[int]) -> Tensor:
    """code * scale in BF16, without packing."""
    chosen = Settings(*settings)
    rows, columns = x.shape[::-1] if chosen.column else x.shape
    if chosen.tries_scales:
        codes, scales = quantize_op(x, amax, settings)
        return operand_op(codes, scales, settings)
    x = _readable(x, chosen)
    out = torch.empty(x.shape[::-1] if chosen.runs_down_columns else x.shape, dtype=torch.bfloat16)
    amax = _readable_amax(amax, out.shape[0], chosen)
    job = _job(x, chosen, amax)
    job.operand = out.data_ptr()
    library().nvfp4_quantize(ctypes.byref(job), int(chosen.runs_down_columns))
    return out[:rows, :columns].contiguous()


@quantize_operand_op.register_fake
def _(x: Tensor, amax: Tensor, settings: list[int]) -> Tensor:  # noqa: ARG001 - the op's signature
    rows, columns = (x.shape[1], x.shape[0]) if settings[0] else (x.shape[0], x.shape[1])
    return x.new_empty(rows, columns, dtype=torch.bfloat16)


@torch.library.custom_op("nvfp4_train::operand", mutates_args=())
def operand_op(codes: Tensor, scales: Tensor, settings: list[int]) -> Tensor:
    """Unpack codes and multiply by their block scales, BF16 [R, C]."""
    chosen = Settings(*settings)
    codes, scales = codes.contiguous(), scales.contiguous()
    out = torch.empty(codes.shape[0], codes.shape[1] * (2 if chosen.is_packed else 1), dtype=torch.bfloat16)
    library().nvfp4_operand(
        *(_address(codes), _address(scales), chosen.element, chosen.scale_kind),
        *(_int64(out.shape[0]), _int64(out.shape[1]), _address(out), torch.get_num_threads()),
    )
    return out


@operand_op.register_fake
def _(codes: Tensor, scales: Tensor, settings: list[int]) -> Tensor:  # noqa: ARG001 - the op's signature
    columns = codes.shape[1] * 2 if Settings(*settings).is_packed else codes.shape[1]
    return codes.new_empty(codes.shape[0], columns, dtype=torch.bfloat16)


def hadamard_transform(x: Tensor, *, size: int, sign_mask: int) -> Tensor:
    """Transform groups along the last dim of x [..., C]; BF16."""
    columns = x.flatten(0, -2).t()  # the kernel runs down columns
    columns = (columns.float() if columns.dtype is torch.float16 else columns).contiguous()
    out = torch.empty(columns.shape[::-1], dtype=torch.bfloat16)
    job = Job(x=columns.data_ptr(), operand=out.data_ptr(), rows=columns.shape[0], columns=columns.shape[1])
    job.stride, job.is_fp32 = columns.stride(0), int(columns.dtype is torch.float32)
    job.hadamard, job.threads = size, torch.get_num_threads()
    job.signs[0], job.signs[1] = sign_mask & (1 << 64) - 1, sign_mask >> 64
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


def random_bytes(stream: RandomStream, rows: int, columns: int) -> Tensor:
    """Bytes of a random stream, uint8 [rows, columns]."""
    out = torch.empty(rows, columns, dtype=torch.uint8)
    job = Job(key=stream.key, rows=rows, columns=columns, **{name: getattr(stream, name) for name in STREAM_PLACES})
    library().nvfp4_random_bytes(ctypes.byref(job), _address(out))
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
    row_padding, column_padding = -x.shape[0] % settings.width, -x.shape[1] % settings.width
    if not (settings.is_tile and settings.has_scales):
        row_padding, column_padding = (row_padding, 0) if settings.runs_down_columns else (0, column_padding)
    if row_padding or column_padding:
        x = pad(x, (0, column_padding, 0, row_padding))
    return x if x.stride(1) == 1 else x.contiguous()


def _readable_amax(amax: Tensor, rows: int, settings: Settings) -> Tensor:
    """Amax as the kernel reads it: one line for every row of the quantized matrix, also for those that fill tiles."""
    if settings.outer > 1 and amax.shape[0] < rows:
        amax = torch.cat([amax, amax[-1:].expand(rows - amax.shape[0], *amax.shape[1:])])
    return amax.contiguous()


def _shape_of_amax(rows: int, columns: int, settings: Settings) -> tuple[int, ...]:
    match settings.outer:
        case 3:
            return rows, -(-columns // CHUNK)
        case 2:
            return (rows,)
        case _:
            return (1,)


def _job(x: Tensor, settings: Settings, amax: Tensor | None = None) -> Job:
    job = Job(x=x.data_ptr(), rows=x.shape[0], columns=x.shape[1], stride=x.stride(0), key=_unsigned(settings.key))
    for name in STREAM_PLACES:
        setattr(job, name, getattr(settings, name))
    job.signs[0], job.signs[1] = _unsigned(settings.signs_low), _unsigned(settings.signs_high)
    if amax is not None:
        job.amax, job.amax_stride = amax.data_ptr(), amax.stride(0)
    job.largest_product = settings.largest_product
    is_published_rule = settings.scale_kind == 0 and settings.outer < 3
    job.smallest_amax = 0.0 if is_published_rule else settings.largest_product / _FP32_MAX
    job.reciprocal = 17 / 96 if settings.is_clip_safe else 1 / 6
    job.is_fp32, job.is_tile, job.stochastic = int(x.dtype is torch.float32), settings.is_tile, settings.stochastic
    job.element, job.scale_kind, job.width = settings.element, settings.scale_kind, settings.width
    job.outer, job.hadamard, job.scale_rule = settings.outer, settings.hadamard, settings.scale_rule
    job.threads = torch.get_num_threads()
    return job


def _address(tensor: Tensor) -> ctypes.c_void_p:
    return _pointer(tensor.data_ptr())


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _unsigned(value: int) -> int:
    return value & (1 << 64) - 1
