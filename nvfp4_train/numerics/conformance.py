"""Recompute every array of a golden file and compare byte for byte, so that users of other hardware can trust it.

A golden file is a safetensors file with inputs and what a reference quantizer made of them. Keys:
`<case>.x` (input), `<case>.<mode>.<row|col>.<data|scale|amax|dequant>`, `<case>.<rht|rht_nosign>.transformed`,
`gemm_<name>.<X|W|dY>` (inputs), `gemm_<name>.q<X|W|dY>.<row|col>.<data|scale|amax>`,
`gemm_<name>.<fprop|dgrad|wgrad>.<f32|bf16|f16>`, and `table.*`.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from nvfp4_train.numerics.formats import E4M3_NAN, e2m1_values, pack_codes
from nvfp4_train.numerics.gemm import reference_gemm
from nvfp4_train.numerics.hadamard import fixed_sign_mask, hadamard_matrix, hadamard_transform
from nvfp4_train.numerics.kernels import Backend, is_compiled, native, use
from nvfp4_train.numerics.layout import swizzle_scales
from nvfp4_train.numerics.quantize import Direction, QuantizedTensor, dequantize, quantize
from nvfp4_train.numerics.rounding import round_nearest_even
from nvfp4_train.numerics.spec import Block, Format, GlobalScale, HadamardSigns, OperandSpec, Rounding, ScaleRule

Tensors = dict[str, Tensor]

_INPUT = re.compile(r".+\.x|gemm_[^.]+\.(X|W|dY)|table\.(round|special|swizzle)_in")
_QUANTIZED = re.compile(
    r"(?P<case>.+)\.(?P<mode>1d|2d|rht|rht_nosign|rowscaled|46_(?:MAE|MSE)_(?:256|448)_[12]d)"
    r"\.(?P<side>row|col)\.(?P<field>data|scale|amax|dequant)"
)
_TRANSFORMED = re.compile(r"(?P<case>.+)\.(?P<mode>rht|rht_nosign)\.transformed")
_GEMM_OPERAND = re.compile(r"(?P<case>gemm_[^.]+)\.q(?P<operand>X|W|dY)\.(?P<side>row|col)\.(?P<field>data|scale|amax)")
_GEMM_RESULT = re.compile(r"(?P<case>gemm_[^.]+)\.(?P<gemm>fprop|dgrad|wgrad)\.(?P<dtype>f32|bf16|f16)")
_TABLE = re.compile(r"table\.(?P<name>e2m1_values|round_out|special_out|rht_matrix_bf16|swizzle_out)")

_DIRECTION = {"row": Direction.row, "col": Direction.column}
_OUT_DTYPE = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
_GEMM_SIDES = {  # the two operands of a GEMM and the sides they are quantized on
    "fprop": (("X", "row"), ("W", "row")),
    "dgrad": (("dY", "row"), ("W", "col")),
    "wgrad": (("dY", "col"), ("X", "col")),
}


@dataclass(frozen=True)
class Difference:
    """The first element of an array that differs."""

    key: str
    description: str


def check_files(paths: Iterable[Path], *, backend: Backend, report: Callable[[str], None]) -> bool:
    """Recompute all arrays of golden files, report one line per case and the total, and return whether all are equal.

    Args:
        paths: safetensors files.
        backend: What recomputes: the oracle, or the compiled kernels without a fallback.
        report: Takes each line.

    Raises:
        ValueError: for a file that cannot be read, has an unknown key or lacks an input; nothing was compared then.
        RuntimeError: for the compiled backend where it cannot be built.
    """
    files = [load_golden(path) for path in paths]
    with use(backend):
        results = [(case, differences) for golden in files for case, differences in _check_cases(golden)]
    num_equal = num_arrays = 0
    for case, arrays in results:
        different = [difference for difference in arrays if difference is not None]
        num_equal += len(arrays) - len(different)
        num_arrays += len(arrays)
        report(f"{case}: {len(arrays) - len(different)}/{len(arrays)} arrays equal ({backend})")
        for difference in different:
            report(f"  {difference.key}: {difference.description}")
    report(f"{num_equal}/{num_arrays} arrays equal ({backend})")
    return num_equal == num_arrays


def load_golden(path: Path) -> Tensors:
    """Read a golden file.

    Raises:
        ValueError: if it is missing, not a safetensors file, or holds nothing to recompute; for an unknown key, by
        name.
    """
    try:
        golden = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: not a readable safetensors file ({error})") from error
    unknown = [key for key in sorted(golden) if not _INPUT.fullmatch(key) and _case(key) is None]
    if unknown:
        raise ValueError(f"{path}: unknown key {unknown[0]}")
    if all(_INPUT.fullmatch(key) for key in golden):
        raise ValueError(f"{path}: holds no array to recompute")
    return golden


def recompute(golden: Tensors, key: str) -> Tensor:
    """Compute the array that `key` names from the file's inputs.

    Raises:
        ValueError: for a key of unknown form, or whose input is missing.
    """
    if match := _GEMM_OPERAND.fullmatch(key):
        side = match["side"]
        operand = match["operand"]
        return _field(_gemm_operand(golden, match["case"], operand, side), match["field"])
    if match := _GEMM_RESULT.fullmatch(key):
        a, b = (_gemm_operand(golden, match["case"], *operand) for operand in _GEMM_SIDES[match["gemm"]])
        return reference_gemm(a, b, out_dtype=_OUT_DTYPE[match["dtype"]])
    if match := _QUANTIZED.fullmatch(key):
        x = _input(golden, f"{match['case']}.x", key)
        spec = _mode_spec(match["mode"])
        return _field(quantize(x, spec, direction=_DIRECTION[match["side"]]), match["field"])
    if match := _TRANSFORMED.fullmatch(key):
        mask = fixed_sign_mask(_mode_spec(match["mode"]).hadamard_signs)
        return hadamard_transform(_input(golden, f"{match['case']}.x", key).t(), size=16, sign_mask=mask)
    if match := _TABLE.fullmatch(key):
        return _table(golden, match["name"])
    raise ValueError(f"{key}: unknown key")


def first_difference(key: str, got: Tensor, expected: Tensor) -> Difference | None:
    """Compare bit for bit; all NaNs are equal, and so are the two NaN bytes of scales."""
    if got.dtype != expected.dtype or got.shape != expected.shape:
        found = f"got {got.dtype} {list(got.shape)}, expected {expected.dtype} {list(expected.shape)}"
        return Difference(key, found)
    if got.dtype.is_floating_point:
        bits = {2: torch.int16, 4: torch.int32}[got.element_size()]
        same = (got.contiguous().view(bits) == expected.contiguous().view(bits)) | (got.isnan() & expected.isnan())
    else:
        same = got == expected
    if key.endswith(".scale"):
        same |= ((got & E4M3_NAN) == E4M3_NAN) & ((expected & E4M3_NAN) == E4M3_NAN)
    if bool(same.all()):
        return None
    index = tuple((~same).nonzero()[0].tolist())
    return Difference(
        key, f"first difference at {list(index)}: got {got[index].item()}, expected {expected[index].item()}"
    )


def _check_cases(golden: Tensors) -> Iterable[tuple[str, list[Difference | None]]]:
    cases: dict[str, list[str]] = defaultdict(list)
    for key in sorted(golden):
        if not _INPUT.fullmatch(key):
            cases[_case(key) or "unknown"].append(key)
    for case, keys in cases.items():
        yield case, [_check(golden, key) for key in keys]


def _check(golden: Tensors, key: str) -> Difference | None:
    try:
        recomputed = recompute(golden, key)
    except (ValueError, RuntimeError) as error:  # an input that cannot be quantized, or operands that do not fit
        raise ValueError(f"{key} cannot be recomputed: {error}") from error
    return first_difference(key, recomputed, golden[key])


def _case(key: str) -> str | None:
    for pattern in (_GEMM_OPERAND, _GEMM_RESULT, _QUANTIZED, _TRANSFORMED):
        if match := pattern.fullmatch(key):
            return match["case"]
    return "table" if _TABLE.fullmatch(key) else None


def _mode_spec(mode: str) -> OperandSpec:
    tiles = mode.endswith("2d")
    rht = mode.startswith("rht")
    fixed_signs = mode == "rht"
    scale_rule, block_scale_max = ScaleRule.amax, 448
    if mode.startswith("46"):
        _, error, maximum, _ = mode.split("_")
        scale_rule = ScaleRule.four_over_six_mae if error == "MAE" else ScaleRule.four_over_six_mse
        block_scale_max = int(maximum)
    return OperandSpec(
        format=Format.nvfp4,
        block=Block.tile_16x16 if tiles else Block.row_1x16,
        rounding=Rounding.nearest_even,
        hadamard_size=16 if rht else 0,
        hadamard_signs=HadamardSigns.fixed if fixed_signs else HadamardSigns.none,
        global_scale=GlobalScale.row if mode == "rowscaled" else GlobalScale.tensor,
        scale_rule=scale_rule,
        block_scale_max=block_scale_max,
    )


def _gemm_operand(golden: Tensors, case: str, operand: str, side: str) -> QuantizedTensor:
    """Weights have 16x16 tiles; the other operands are transformed on the column side if they are BF16."""
    x = _input(golden, f"{case}.{operand}", case)
    transformed = side == "col" and x.dtype is torch.bfloat16
    mode = "2d" if operand == "W" else "rht" if transformed else "1d"
    return quantize(x, _mode_spec(mode), direction=_DIRECTION[side])


def _field(quantized: QuantizedTensor, field: str) -> Tensor:
    if field == "dequant":
        return dequantize(quantized)
    return {"data": quantized.codes, "scale": quantized.block_scale, "amax": quantized.amax}[field]


def _table(golden: Tensors, name: str) -> Tensor:
    compiled = is_compiled(torch.empty(0))
    match name:
        case "e2m1_values":
            return native.e2m1_values() if compiled else e2m1_values()
        case "rht_matrix_bf16":
            identity = torch.eye(16, dtype=torch.bfloat16)
            if not compiled:
                return hadamard_matrix(HadamardSigns.fixed)
            return hadamard_transform(identity, size=16, sign_mask=fixed_sign_mask(HadamardSigns.fixed))
        case "swizzle_out":
            scales = _input(golden, "table.swizzle_in", "table.swizzle_out")
            return native.swizzle_scales(scales) if compiled else swizzle_scales(scales)
        case _:
            scaled = _input(golden, f"table.{name.removesuffix('_out')}_in", f"table.{name}").clamp(-6.0, 6.0)
            return native.round_nearest_even(scaled) if compiled else pack_codes(round_nearest_even(scaled))


def _input(golden: Tensors, name: str, needed_by: str) -> Tensor:
    if name not in golden:
        raise ValueError(f"{needed_by}: its input {name} is not in the file")
    return golden[name]
