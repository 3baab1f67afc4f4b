"""The six operands of a Linear's three GEMMs: rounding them, with their random bytes, and keeping them packed."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from nvfp4_train.numerics.both import Cell, compute_amax_both, quantize_both
from nvfp4_train.numerics.gemm import Operand, PackedOperand, reads_packed
from nvfp4_train.numerics.hadamard import drawn_sign_mask
from nvfp4_train.numerics.quantize import Direction, QuantizedTensor, compute_amax, quantize, quantize_operand
from nvfp4_train.numerics.quantizer import round_outside, value_spec
from nvfp4_train.numerics.random import RandomStream, stream_key
from nvfp4_train.numerics.spec import GlobalScale, HadamardSigns, OperandSpec, Rounding
from nvfp4_train.precision.amax_history import AmaxHistory


@dataclass(frozen=True)
class OperandPlace:
    """Where an operand's matrix lies: which dim of the tensor is contracted, and what the rows and columns count."""

    direction: Direction
    rows: str
    columns: str


# Rows and columns are those of the quantized matrix, whose last dim is the GEMM's contraction dim.
OPERAND_PLACES = {
    "fprop.x": OperandPlace(Direction.row, "tokens", "inputs"),
    "fprop.w": OperandPlace(Direction.row, "outputs", "inputs"),
    "dgrad.dy": OperandPlace(Direction.row, "tokens", "outputs"),
    "dgrad.w": OperandPlace(Direction.column, "inputs", "outputs"),
    "wgrad.x": OperandPlace(Direction.column, "inputs", "tokens"),
    "wgrad.dy": OperandPlace(Direction.column, "outputs", "tokens"),
}


@dataclass(frozen=True)
class StoredOperand:
    """An operand kept for a later GEMM in the smallest form: packed codes, or the tensor itself in high precision.

    Args:
        tensors: (codes, block_scale, amax), or (tensor,) as it is before the cast to its format.
        spec: How the operand is rounded.
        direction: Which dim of the original tensor is contracted.
        shape: Rows and columns of the quantized matrix.
        dtype: Dtype of the tensor that was quantized.
        is_transposed: Whether the GEMM contracts the other dim of the codes (16x16 tiles do not depend on the
            direction).
    """

    tensors: tuple[Tensor, ...]
    spec: OperandSpec
    direction: Direction
    shape: tuple[int, int]
    dtype: torch.dtype
    is_transposed: bool = False

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> "StoredOperand":
        """Return the same operand over other tensors; autograd keeps them apart from the rest."""
        return replace(self, tensors=tensors)

    def transposed(self) -> "StoredOperand":
        """Return the operand for a GEMM that contracts the other dim of the same codes."""
        return replace(self, is_transposed=not self.is_transposed)

    def to_gemm_operand(self) -> Operand:
        """Return what a GEMM multiplies, still packed."""
        if not self.spec.is_quantized:
            return quantize_operand(self.tensors[0], self.spec, direction=self.direction)
        codes, block_scale, amax = self.tensors
        quantized = QuantizedTensor(codes, block_scale, amax, self.spec, self.shape, self.dtype)
        return PackedOperand(quantized, self.is_transposed)


@dataclass(frozen=True, kw_only=True)
class OperandRounder:
    """Rounds the operands of one forward of one layer and of its backward.

    Plain values, fixed when the forward starts: a backward that runs later draws the bytes that belong to its own
    microbatch.

    Args:
        layer: Name of the Linear in the whole model; part of its random streams.
        specs: OperandSpec of each operand (`LinearRecipe.operands`).
        seed: Seed of the run.
        step: Optimizer step.
        offsets: Global index of the first of the `tokens`, `inputs` and `outputs` that this tensor holds.
        reduce_amax: Makes ranks that hold parts of one operand agree on its amax, given the operand's name and what
            this rank found.
        record: Told the name of each operand that is quantized, and its amax.
        history: Maxima of older steps, for the operands that scale by them.
        is_training: Whether the maxima of this call's tensors belong to the step; those of weights always do.
        token_segment: Tokens that follow each other in the global batch too, where this rank holds only a slice of
            every sequence; 0 is all of them.
        token_stride: Length of the whole sequences then.
    """

    layer: str
    specs: dict[str, OperandSpec]
    seed: int
    step: int
    offsets: dict[str, int]
    reduce_amax: Callable[[str, Tensor], Tensor]
    record: Callable[[str, Tensor], None]
    history: AmaxHistory = field(default_factory=lambda: AmaxHistory({}))
    is_training: bool = False
    token_segment: int = 0
    token_stride: int = 0

    def round(self, name: str, tensor: Tensor) -> Operand:
        """Round `tensor` [M, N] to the operand `name` of a GEMM that runs at once."""
        spec, direction = self.specs[name], OPERAND_PLACES[name].direction
        if spec.quantizer is not None or reads_packed(tensor, spec):
            return self.store(name, tensor).to_gemm_operand()
        if not spec.is_quantized:
            return quantize_operand(tensor, spec, direction=direction)
        amax = self._agree_on_amax(name, tensor)
        stream, sign_mask = self.stream(name), self.sign_mask(name)
        return quantize_operand(tensor, spec, direction=direction, amax=amax, stream=stream, sign_mask=sign_mask)

    def store(self, name: str, tensor: Tensor) -> StoredOperand:
        """Round `tensor` [M, N] to the operand `name` of a GEMM that runs later."""
        spec, direction = self.specs[name], OPERAND_PLACES[name].direction
        if not spec.is_quantized:
            return StoredOperand((tensor,), spec, direction, (tensor.shape[0], tensor.shape[1]), tensor.dtype)
        amax = self._agree_on_amax(name, tensor)
        stream, sign_mask = self.stream(name), self.sign_mask(name)
        if spec.quantizer is None:
            packed = quantize(tensor, spec, direction=direction, amax=amax, stream=stream, sign_mask=sign_mask)
            return _stored_codes(packed, direction)
        result = round_outside(tensor, spec, direction=direction, amax=amax, stream=stream, sign_mask=sign_mask)
        if isinstance(result, QuantizedTensor):
            return _stored_codes(result, direction)
        shape = (result.shape[0], result.shape[1])
        return StoredOperand((result,), value_spec(result), Direction.row, shape, result.dtype)

    def store_both(self, row: str, column: str, tensor: Tensor) -> tuple[StoredOperand, StoredOperand]:
        """Round `tensor` [M, N] to two operands, one of each direction, reading it once."""
        names = (row, column)
        if any(self.specs[name].quantizer is not None or not self.specs[name].is_quantized for name in names):
            return self.store(row, tensor), self.store(column, tensor)
        first, second = (self._cell(name) for name in names)
        found = compute_amax_both(tensor, first, second)
        agreed = [self._agree(name, amax) for name, amax in zip(names, found, strict=True)]
        packed = quantize_both(tensor, first, second, amax=(agreed[0], agreed[1]))
        return _stored_codes(packed[0], Direction.row), _stored_codes(packed[1], Direction.column)

    def rounds_both(self, row: str, column: str, tensor: Tensor) -> bool:
        """Say whether `store_both` is the fast way: GEMMs read both operands packed."""
        specs = [self.specs[name] for name in (row, column)]
        return all(spec.quantizer is None and reads_packed(tensor, spec) for spec in specs)

    def _cell(self, name: str) -> Cell:
        direction = OPERAND_PLACES[name].direction
        return Cell(
            spec=self.specs[name], direction=direction, stream=self.stream(name), sign_mask=self.sign_mask(name)
        )

    def stream(self, name: str) -> RandomStream | None:
        """Return where the random bytes of an operand come from, or None if it needs none."""
        return self.stream_of(name) if self.specs[name].rounding is Rounding.stochastic else None

    def stream_of(self, name: str) -> RandomStream:
        """Return the stream of an operand, whether or not its rounding draws from it."""
        place = OPERAND_PLACES[name]
        key = stream_key(seed=self.seed, layer=self.layer, operand=name, step=self.step)
        tokens, whole = (self.token_segment, self.token_stride), (0, 0)
        row_segment, row_stride = tokens if place.rows == "tokens" else whole
        column_segment, column_stride = tokens if place.columns == "tokens" else whole
        return RandomStream(
            key,
            row_offset=self.offsets[place.rows],
            row_segment=row_segment,
            row_stride=row_stride,
            column_offset=self.offsets[place.columns],
            column_segment=column_segment,
            column_stride=column_stride,
        )

    def sign_mask(self, name: str) -> int | None:
        """Return the signs of an operand's Hadamard transform, or None if they are not drawn.

        The two operands of a GEMM get the same, and so do ranks that hold slices of the same sequences.
        """
        signs = self.specs[name].hadamard_signs
        if signs in (HadamardSigns.none, HadamardSigns.fixed):
            return None
        first = self.offsets["tokens"]
        row = first - first % self.token_stride if self.token_stride else first  # where the first sequence starts
        return drawn_sign_mask(signs, seed=self.seed, layer=self.layer, step=self.step, row=row)

    def _agree_on_amax(self, name: str, tensor: Tensor) -> Tensor:
        spec, direction = self.specs[name], OPERAND_PLACES[name].direction
        return self._agree(name, compute_amax(tensor, spec, direction=direction, sign_mask=self.sign_mask(name)))

    def _agree(self, name: str, amax: Tensor) -> Tensor:
        """Return what an operand is scaled by, given the maximum of what this rank holds."""
        spec = self.specs[name]
        if not spec.has_amax:
            return amax
        if spec.fp32_scale is not GlobalScale.block_128:  # no rank holds a part of a block
            amax = self.reduce_amax(name, amax)
        self.record(name, amax)
        if not spec.amax_history_length:
            return amax
        # a weight that an evaluation has quantized is kept for the step, which then does not look at it again
        if self.is_training or name.endswith(".w"):
            self.history.record(name, amax)
        return self.history.scale_by(name, amax)


def _stored_codes(packed: QuantizedTensor, direction: Direction) -> StoredOperand:
    tensors = (packed.codes, packed.block_scale, packed.amax)
    return StoredOperand(tensors, packed.spec, direction, packed.shape, packed.dtype)
