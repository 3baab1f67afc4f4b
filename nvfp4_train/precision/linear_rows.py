"""The three GEMMs of one call of a Linear: the table's own, and those that a recipe takes from outside.

    fprop  y  = x  w^T     contracts the input features
    dgrad  dx = dy w       contracts the output features
    wgrad  dw = dy^T x     contracts the tokens

Between forward and backward only packed operands are kept: x as wgrad will contract it and w as dgrad will, not the
tensors they came from. A row from outside gets those tensors instead, so they are kept for it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nvfp4_train.config.recipe import DgradRow, FpropRow, LinearRecipe, WgradRow
from nvfp4_train.model.linear import DeferGradient
from nvfp4_train.model.part import WHOLE, ParameterPart
from nvfp4_train.numerics.extension import resolve
from nvfp4_train.numerics.gemm import Operand, exact_gemm
from nvfp4_train.numerics.quantize import Direction, GemmOperand
from nvfp4_train.numerics.quantizer import value_spec
from nvfp4_train.numerics.random import RandomStream
from nvfp4_train.numerics.spec import GemmMode
from nvfp4_train.precision.operands import OperandRounder, StoredOperand
from nvfp4_train.precision.row_groups import NO_GROUPS, RowGroups
from nvfp4_train.precision.weight_cache import WeightCache


@dataclass(frozen=True, kw_only=True)
class LinearTools:
    """What a GEMM row or a Linear pair from outside can use.

    Args:
        rounder: Rounds operands as the cells of the recipe say.
        gemm: How operands are multiplied.
        needs_dx: Whether the gradient of x is needed.
        needs_dw: Whether the gradient of the weight is needed.
    """

    rounder: OperandRounder
    gemm: GemmMode
    needs_dx: bool
    needs_dw: bool

    def round(self, name: str, tensor: Tensor) -> Operand:
        """Round x, w or dy [M, N] as the cell `name` (`wgrad.dy`) says, with its contracted dim last."""
        return self.rounder.round(name, tensor)

    def stream(self, name: str) -> RandomStream:
        """Return the random stream of a cell for this layer, step and microbatch, whatever the cell's rounding."""
        return self.rounder.stream_of(name)

    def multiply(self, a: Operand | Tensor, b: Operand | Tensor, *, out_dtype: torch.dtype) -> Tensor:
        """Return a b^T [R_a, R_b] for rounded operands or bf16 or fp32 tensors [R, K], rounded once."""
        return exact_gemm(_operand(a), _operand(b), mode=self.gemm, out_dtype=out_dtype)


@dataclass(frozen=True)
class Saved:
    """What a forward keeps for its backward.

    Args:
        tensors: Handed to autograd, which frees them after the backward and lets hooks offload them.
        operands: By name, without their tensors, and how many tensors each has.
    """

    tensors: tuple[Tensor, ...]
    operands: tuple[tuple[str, StoredOperand, int], ...] = ()

    @classmethod
    def of(cls, **operands: StoredOperand | None) -> "Saved":
        """Take operands apart; those that are None are left out."""
        kept = {name: operand for name, operand in operands.items() if operand is not None}
        return cls(
            tuple(tensor for operand in kept.values() for tensor in operand.tensors),
            tuple((name, operand.with_tensors(()), len(operand.tensors)) for name, operand in kept.items()),
        )

    def without_tensors(self) -> "Saved":
        """Return the rest, which autograd need not see."""
        return replace(self, tensors=())

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> "Saved":
        """Put the tensors back."""
        return replace(self, tensors=tuple(tensors))

    def num_input_bytes(self, weight: Tensor) -> int:
        """Return the bytes of all tensors but those of the weight."""
        tensors = self.operand("x").tensors if any(name == "x" for name, _, _ in self.operands) else ()
        if not self.operands:  # of a pair from outside
            tensors = tuple(tensor for tensor in self.tensors if tensor.data_ptr() != weight.data_ptr())
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def operand(self, name: str) -> StoredOperand:
        """Return one operand with its tensors."""
        start = 0
        for other, operand, count in self.operands:
            if other == name:
                return operand.with_tensors(self.tensors[start : start + count])
            start += count
        raise AssertionError(f"{name} was not saved")


@dataclass(frozen=True, kw_only=True)
class LinearCall:
    """What one forward of a QuantizedLinear fixes, for itself and for its backward.

    Args:
        recipe: The table.
        rounder: Rounds the operands with the random bytes of this microbatch.
        gemm: How operands are multiplied.
        weights: The layer's cache.
        weight_version: The caller's counter of weight changes.
        has_backward: Whether autograd records this call; inside an autograd function it cannot be asked.
        record_saved: Told the bytes kept of the input.
        groups: Of the weight's rows: what is computed here has them filled up, y and dy too.
        y_dtype: Dtype of y; None: that of x.
        part: How to compute with the parts of the parameters that are held here.
        adds_bias: Whether the bias is added here.
        defer: Takes the gradient of the weight in a backward, to compute it later; None: at once.
    """

    recipe: LinearRecipe
    rounder: OperandRounder
    gemm: GemmMode
    weights: WeightCache
    weight_version: int
    has_backward: bool
    record_saved: Callable[[int], None]
    groups: RowGroups = NO_GROUPS
    y_dtype: torch.dtype | None = None
    part: ParameterPart = WHOLE
    adds_bias: bool = True
    defer: DeferGradient | None = None

    def forward(self, x: Tensor, weight: Tensor, *, needs_dx: bool, needs_dw: bool) -> tuple[Tensor, Saved]:
        """Return y [T, out_features], and what the gradients that are needed need."""
        y_dtype = self.y_dtype or x.dtype
        if self.recipe.pair is not None:
            tools = self._tools(needs_dx=needs_dx, needs_dw=needs_dw)
            padded = self._padded(weight, x.dtype)
            y, tensors = resolve(self.recipe.pair).forward(x, padded, tools, **(self.recipe.args or {}))
            return _checked(y, self.recipe.pair, (x.shape[0], padded.shape[0])).to(y_dtype), Saved(tuple(tensors))
        stored_x = None
        if self.recipe.fprop.gemm is not None:
            padded = self._padded(weight, x.dtype)
            y = self._outside("fprop", self.recipe.fprop, x, padded)
            y = _checked(y, self.recipe.fprop.gemm, (x.shape[0], padded.shape[0])).to(y_dtype)
        else:
            if needs_dw and self.recipe.wgrad.gemm is None and self.rounder.rounds_both("fprop.x", "wgrad.x", x):
                rounded_x, stored_x = self.rounder.store_both("fprop.x", "wgrad.x", x)
                operand = rounded_x.to_gemm_operand()
            else:
                operand = self.rounder.round("fprop.x", x)
            y = self._multiply(operand, self._weight("fprop.w", weight), y_dtype)
        if needs_dw and stored_x is None:
            stored_x = self._saved_input(x)
        return y, Saved.of(w=self._saved_weight(weight) if needs_dx else None, x=stored_x)

    def backward(
        self, dy: Tensor, saved: Saved, *, needs_dx: bool, needs_dw: bool, x_dtype: torch.dtype
    ) -> tuple[Tensor | None, Callable[[], Tensor]]:
        """Return dx [T, in_features] in the dtype of x, if needed, and what returns dw.

        That is [out_features, in_features] in FP32, and computed when it is called: once, or never if it is not needed.
        """
        if self.recipe.pair is not None:
            return self._backward_of_pair(dy, saved, needs_dx=needs_dx, needs_dw=needs_dw, x_dtype=x_dtype)
        has_outside = self.recipe.dgrad.gemm is not None or self.recipe.wgrad.gemm is not None
        if needs_dx and needs_dw and not has_outside and self.rounder.rounds_both("dgrad.dy", "wgrad.dy", dy):
            for_dx, for_dw = self.rounder.store_both("dgrad.dy", "wgrad.dy", dy)
            dx = self._multiply(for_dx.to_gemm_operand(), saved.operand("w").to_gemm_operand(), x_dtype)
            return dx, partial(self._wgrad_of_stored, for_dw, saved)
        return (
            self._dgrad(dy, saved.operand("w"), x_dtype) if needs_dx else None,
            partial(self._wgrad, dy, saved),
        )

    def _backward_of_pair(
        self, dy: Tensor, saved: Saved, *, needs_dx: bool, needs_dw: bool, x_dtype: torch.dtype
    ) -> tuple[Tensor | None, Callable[[], Tensor]]:
        path = self.recipe.pair
        assert path is not None
        tools = self._tools(needs_dx=needs_dx, needs_dw=needs_dw)
        dx, dw = resolve(path).backward(dy, saved.tensors, tools, **(self.recipe.args or {}))
        for name, value, needed in (("dx", dx, needs_dx), ("dw", dw, needs_dw)):
            if needed and not isinstance(value, Tensor):
                raise ValueError(f"{path}: backward must return {name}, found {type(value).__name__}")
        return dx.to(x_dtype) if needs_dx else None, lambda: dw.to(torch.float32)

    def _dgrad(self, dy: Tensor, w: StoredOperand, x_dtype: torch.dtype) -> Tensor:
        path = self.recipe.dgrad.gemm
        if path is None:
            return self._multiply(self.rounder.round("dgrad.dy", dy), w.to_gemm_operand(), x_dtype)
        weight = w.tensors[0].to(dy.dtype)
        dx = self._outside("dgrad", self.recipe.dgrad, dy, weight)
        return _checked(dx, path, (dy.shape[0], weight.shape[1])).to(x_dtype)

    def _wgrad_of_stored(self, dy: StoredOperand, saved: Saved) -> Tensor:
        return self._multiply(dy.to_gemm_operand(), saved.operand("x").to_gemm_operand(), torch.float32)

    def _wgrad(self, dy: Tensor, saved: Saved) -> Tensor:
        path, x = self.recipe.wgrad.gemm, saved.operand("x")
        if path is None:
            return self._multiply(self.rounder.round("wgrad.dy", dy), x.to_gemm_operand(), torch.float32)
        dw = self._outside("wgrad", self.recipe.wgrad, x.tensors[0], dy)
        return _checked(dw, path, (dy.shape[1], x.tensors[0].shape[1])).to(torch.float32)

    def _saved_weight(self, weight: Tensor) -> StoredOperand:
        if self.recipe.dgrad.gemm is not None:
            return _as_it_is(self._padded(weight, weight.dtype))
        return self._weight_operand("dgrad.w", weight)

    def _saved_input(self, x: Tensor) -> StoredOperand:
        return _as_it_is(x) if self.recipe.wgrad.gemm is not None else self.rounder.store("wgrad.x", x)

    def _weight(self, name: str, weight: Tensor) -> Operand:
        return self._weight_operand(name, weight).to_gemm_operand()

    def _weight_operand(self, name: str, weight: Tensor) -> StoredOperand:
        return self.weights.operand(name, weight, rounder=self.rounder, version=self.weight_version, groups=self.groups)

    def _padded(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        return self.groups.pad(weight.to(dtype), dim=0)

    def _multiply(self, a: Operand, b: Operand, out_dtype: torch.dtype) -> Tensor:
        return exact_gemm(a, b, mode=self.gemm, out_dtype=out_dtype)

    def _outside(self, name: str, row: FpropRow | DgradRow | WgradRow, first: Tensor, second: Tensor) -> Any:
        """Call a row from outside with its two tensors in the order of the table's columns."""
        assert row.gemm is not None
        tools = self._tools(needs_dx=name == "dgrad", needs_dw=name == "wgrad")
        return resolve(row.gemm)(first, second, tools, **(row.args or {}))

    def _tools(self, *, needs_dx: bool, needs_dw: bool) -> LinearTools:
        return LinearTools(rounder=self.rounder, gemm=self.gemm, needs_dx=needs_dx, needs_dw=needs_dw)


def _as_it_is(tensor: Tensor) -> StoredOperand:
    shape = (tensor.shape[0], tensor.shape[1])
    return StoredOperand((tensor,), value_spec(tensor), Direction.row, shape, tensor.dtype)


def _operand(value: Operand | Tensor) -> Operand:
    return GemmOperand(value, None, value_spec(value)) if isinstance(value, Tensor) else value


def _checked(value: Any, path: str, shape: tuple[int, int]) -> Tensor:
    if not isinstance(value, Tensor) or value.shape != shape:
        found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{path}: expected a result of {shape}, found {found}")
    return value
