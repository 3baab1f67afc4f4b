"""GEMMs on quantized operands: the bit-exact reference, and the fast one with exact operands and one rounding."""

import logging
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from nvfp4_train.numerics.blockwise import chunk_factors, exact_product, has_chunks, reference_width, sum_blocks
from nvfp4_train.numerics.kernels import gemm as kernel
from nvfp4_train.numerics.kernels import is_compiled, native
from nvfp4_train.numerics.quantize import GemmOperand, QuantizedTensor, gemm_operand, transposed_amax
from nvfp4_train.numerics.scaling import largest_product, safe_amax
from nvfp4_train.numerics.spec import CHUNK, Format, GemmMode, GlobalScale, OperandSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PackedOperand:
    """A quantized operand that stays packed until a GEMM needs its values.

    Args:
        quantized: The codes and scales.
        is_transposed: Whether the GEMM contracts the other dim of the codes; 16x16 tiles do not depend on it.
    """

    quantized: QuantizedTensor
    is_transposed: bool = False

    @property
    def spec(self) -> OperandSpec:
        """How it was quantized."""
        return self.quantized.spec

    @property
    def amax(self) -> Tensor:
        """fp32 [1], [R] or [R, K/128]."""
        amax = self.quantized.amax
        return transposed_amax(amax, self.spec, rows=self.shape[0]) if self.is_transposed else amax

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.quantized.codes.device

    @property
    def shape(self) -> tuple[int, int]:
        """(R, K) as the GEMM sees it."""
        rows, columns = self.quantized.shape
        return (columns, rows) if self.is_transposed else (rows, columns)

    @property
    def values(self) -> Tensor:
        """Decode to bf16 [R, K], anew each time."""
        return self.unpacked().values

    def unpacked(self) -> GemmOperand:
        """Return the same operand with its values."""
        operand = gemm_operand(self.quantized)
        return operand.transposed() if self.is_transposed else operand


Operand = GemmOperand | PackedOperand


def reads_packed(x: Tensor, spec: OperandSpec) -> bool:
    """Say whether GEMMs on x's device multiply codes of this spec faster than values unpacked before."""
    return spec.is_quantized and kernel.multiplies(x)


def global_alpha(a: Operand, b: Operand) -> Tensor:
    """Return the factor that turns the product of two operands' values into the product of the operands.

    An operand with one FP32 scale per tensor or row contributes amax / largest product (nvfp4: 6 * block_scale_max;
    fp8: 448 or 57344), other operands contribute 1.

    Returns:
        fp32 0-dim; [R_a, 1], [1, R_b] or [R_a, R_b] where operands have one global scale per row.
    """
    return _alpha(a.amax, b.amax, a.spec, b.spec, device=a.device)


def exact_gemm(a: Operand, b: Operand, *, mode: GemmMode, out_dtype: torch.dtype) -> Tensor:
    """Return global_alpha * a.values @ b.values^T, [R_a, R_b], rounded once to `out_dtype`.

    Which operands are exact, and where:

    - nvfp4 and fp8 values are BF16 numbers between 2^-16 and 57344 whatever the tensor, see `GemmOperand`, and so are
      their products FP32 numbers: only the FP32 sums round, and the result once at the end, in every mode.
    - mx values carry no scale besides, so they lie where the tensor lies. They are exact from BF16's smallest normal
      number, 2^-126, up to its largest; so are products from 2^-126 on. BF16 instructions flush what is smaller to
      zero (`bf16_exact`, and so `auto` on CPUs that have them); `fp32_exact` and `fp32_blockwise` keep it, down to
      BF16's smallest number 2^-133: below it, 8-bit codes times the smallest scales are rounded to BF16. An element
      beyond 1.93 * 2^127 may round to 2^128, infinity.
    - With one FP32 scale per 128 elements of the contraction (fp8 blocks, nvfp4 with `global_scale: block_128`), the
      values are as above, and the product of every 128 columns is multiplied by its scales before it is added up in
      FP32.
    - BF16 operands are multiplied as they are, FP32 operands (the fp32 recipe) in FP32.

    `fp32_blockwise` is the reference order of summation: exact sums inside blocks, rounded to FP32 and added up one by
    one.

    Args:
        a: [R_a, K].
        b: [R_b, K].
        mode: How to multiply.
        out_dtype: fp32 or bf16.

    Raises:
        ValueError: for operands that differ in K; for bf16_exact with an FP32 operand, whose values BF16 cannot hold.
    """
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"gemm: the operands contract different lengths, found {a.shape[1]} and {b.shape[1]}")
    fp32_operand = Format.fp32 in (a.spec.format, b.spec.format)
    if fp32_operand and mode is GemmMode.bf16_exact:
        raise ValueError("gemm: found bf16_exact with an fp32 operand, which BF16 cannot hold; use fp32_exact or auto")
    in_bf16 = mode is not GemmMode.fp32_blockwise and not fp32_operand and _multiplies_in_bf16(mode, a.device)
    is_quantized = a.spec.is_quantized or b.spec.is_quantized
    if in_bf16 and (is_quantized or out_dtype is torch.float32) and _kernel_multiplies(a, b):
        return _kernel_gemm(a, b, out_dtype=out_dtype)
    if mode is GemmMode.fp32_blockwise or has_chunks(a.spec) or has_chunks(b.spec):
        return _blockwise_gemm(_unpacked(a), _unpacked(b), mode=mode, out_dtype=out_dtype)
    alpha = global_alpha(a, b)
    a_values, b_values = a.values, b.values
    if in_bf16 and a_values.is_cuda:
        return (torch.mm(a_values, b_values.t(), out_dtype=torch.float32) * alpha).to(out_dtype)
    if in_bf16 and out_dtype is torch.bfloat16 and alpha.dim() == 0:
        return torch.ops.nvfp4_train.gemm_bf16(a_values, b_values, alpha)
    product = torch.ops.nvfp4_train.gemm_fp32(a_values, b_values, bf16_products=in_bf16)
    return (product * alpha).to(out_dtype)


def reference_gemm(a: QuantizedTensor, b: QuantizedTensor, *, out_dtype: torch.dtype) -> Tensor:
    """Return a @ b^T, [R_a, R_b], with the summation order that defines the format's emulated GEMM, bit for bit.

    Blocks (of 16 for nvfp4) are summed in ascending order in FP32; everything inside a block is exact. Slow: for tests
    and conformance, and as `gemm: fp32_blockwise` for studies.
    """
    if not (is_compiled(a.codes) and all(_is_published(quantized.spec) for quantized in (a, b))):
        return exact_gemm(gemm_operand(a), gemm_operand(b), mode=GemmMode.fp32_blockwise, out_dtype=out_dtype)
    total = native.reference_gemm(a.codes, a.block_scale, b.codes, b.block_scale)
    return _scaled(total, _alpha(a.amax, b.amax, a.spec, b.spec, device=a.codes.device), a.shape[1]).to(out_dtype)


def _is_published(spec: OperandSpec) -> bool:
    return spec.format is Format.nvfp4 and not has_chunks(spec)


def _scaled(total: Tensor, alpha: Tensor, depth: int) -> Tensor:
    """An empty contraction is zero, whatever the factor."""
    return alpha * total if depth else total


def _unpacked(side: Operand) -> GemmOperand:
    return side.unpacked() if isinstance(side, PackedOperand) else side


def _blockwise_gemm(a: GemmOperand, b: GemmOperand, *, mode: GemmMode, out_dtype: torch.dtype) -> Tensor:
    alpha = global_alpha(a, b)
    if mode is GemmMode.fp32_blockwise:
        total = sum_blocks(a, b, width=reference_width(a.spec, b.spec), multiply=exact_product)
    else:
        in_bf16 = _multiplies_in_bf16(mode, a.device) and Format.fp32 not in (a.spec.format, b.spec.format)
        total = sum_blocks(a, b, width=CHUNK, multiply=partial(_product, in_bf16=in_bf16))
    return _scaled(total, alpha, a.shape[1]).to(out_dtype)


def _product(a: Tensor, b: Tensor, *, in_bf16: bool) -> Tensor:
    """a b^T in FP32."""
    if in_bf16 and a.is_cuda:
        return torch.mm(a, b.t(), out_dtype=torch.float32)
    if in_bf16 and kernel.multiplies(a) and 1 in a.stride() and 1 in b.stride():
        one = torch.ones((), device=a.device)
        layouts = 2 * kernel.layout_of_values()
        return torch.ops.nvfp4_train.gemm([a], [b], one, [None, None], layouts=layouts, out_dtype=torch.float32)
    return torch.ops.nvfp4_train.gemm_fp32(a, b, bf16_products=in_bf16)


def _kernel_multiplies(a: Operand, b: Operand) -> bool:
    """The kernel reads values with one unit stride, and codes of the formats it knows.

    What is BF16 in and out it leaves to PyTorch, whose GEMM is 4 % faster on unpacked operands.
    """
    return all(
        kernel.multiplies(side.quantized.codes)
        if isinstance(side, PackedOperand)
        else kernel.multiplies(side.values) and 1 in side.values.stride()
        for side in (a, b)
    )


def _kernel_gemm(a: Operand, b: Operand, *, out_dtype: torch.dtype) -> Tensor:
    parts, layouts = [], []
    for side in (a, b):
        if isinstance(side, PackedOperand):
            parts.append([side.quantized.codes, side.quantized.block_scale])
            layouts += kernel.layout_of_codes(side.spec, is_transposed=side.is_transposed)
        else:
            parts.append([side.values])
            layouts += kernel.layout_of_values()
    factors = [chunk_factors(side.amax, side.spec) for side in (a, b)]
    return torch.ops.nvfp4_train.gemm(*parts, global_alpha(a, b), factors, layouts=layouts, out_dtype=out_dtype)


def _alpha(
    amax_a: Tensor | None, amax_b: Tensor | None, spec_a: OperandSpec, spec_b: OperandSpec, *, device: torch.device
) -> Tensor:
    """(amax_a * amax_b) / (largest product of code and block scale of a * that of b), in this order.

    Operands without an FP32 scale, or with one that changes inside the contraction, contribute 1.
    """
    largest = 1.0
    numerator = torch.ones((), dtype=torch.float32, device=device)
    for amax, spec, dim in ((amax_a, spec_a, 1), (amax_b, spec_b, 0)):
        if amax is None or not spec.has_amax or has_chunks(spec):
            continue
        largest *= largest_product(spec)
        factor = safe_amax(amax, spec)
        numerator = numerator * (factor.unsqueeze(dim) if spec.fp32_scale is GlobalScale.row else factor.reshape(()))
    return numerator / torch.tensor(largest, dtype=torch.float32, device=device)


def _multiplies_in_bf16(mode: GemmMode, device: torch.device) -> bool:
    if mode is GemmMode.auto:
        return device.type != "cpu" or _best_cpu_mode() is GemmMode.bf16_exact
    return mode is GemmMode.bf16_exact


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _best_cpu_mode() -> GemmMode:
    return _cpu_mode()


@cache
def _cpu_mode() -> GemmMode:
    """Without BF16 instructions a CPU's BF16 GEMM is about 200 times slower than its FP32 GEMM."""
    has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    mode = GemmMode.bf16_exact if has_bf16 else GemmMode.fp32_exact
    logger.info("gemm: auto is %s on this CPU (BF16 instructions: %s)", mode, "yes" if has_bf16 else "no")
    return mode


# Custom ops, so that a compiled graph holds one opaque call: the factor must become a Python number, and a backend
# flag is set.
@torch.library.custom_op("nvfp4_train::gemm_bf16", mutates_args=())
def _gemm_bf16(a: Tensor, b: Tensor, alpha: Tensor) -> Tensor:
    """alpha * a @ b^T on a CPU, BF16 in and out: the factor is applied to the FP32 sums, before the only rounding."""
    ignored = a.new_empty(a.shape[0], b.shape[0])
    return torch.addmm(ignored, a, b.t(), beta=0, alpha=alpha.item())


@_gemm_bf16.register_fake
def _(a: Tensor, b: Tensor, alpha: Tensor) -> Tensor:  # noqa: ARG001 - the op's signature
    return a.new_empty(a.shape[0], b.shape[0])


@torch.library.custom_op("nvfp4_train::gemm_fp32", mutates_args=())
def _gemm_fp32(a: Tensor, b: Tensor, *, bf16_products: bool) -> Tensor:
    """a @ b^T with FP32 output; `bf16_products` lets the CPU multiply in BF16, exact for operands that BF16 holds."""
    flags = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = flags.fp32_precision
    flags.fp32_precision = "bf16" if bf16_products else "ieee"
    try:
        return a.to(torch.float32) @ b.to(torch.float32).t()
    finally:
        flags.fp32_precision = before


@_gemm_fp32.register_fake
def _(a: Tensor, b: Tensor, *, bf16_products: bool) -> Tensor:  # noqa: ARG001 - the op's signature
    return a.new_empty(a.shape[0], b.shape[0], dtype=torch.float32)
