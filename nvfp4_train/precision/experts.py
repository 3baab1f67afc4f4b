"""The Linears of a mixture of experts under a recipe.

Each expert is a Linear of its own: its tokens are one tensor with its own amax and its own random stream, and its
weight is another. Tokens are padded with zero rows to the recipe's multiple, which changes neither an amax nor a sum.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from nvfp4_train.config.recipe import LinearRecipe
from nvfp4_train.model.linear import GroupedLinear, grouped_linear
from nvfp4_train.numerics.gemm import exact_gemm
from nvfp4_train.numerics.spec import Format, GemmMode
from nvfp4_train.precision.linear import LinearPrecision
from nvfp4_train.precision.operands import OperandRounder, StoredOperand
from nvfp4_train.precision.position import RoundingPosition
from nvfp4_train.precision.weight_cache import WeightCache


class QuantizedExperts(GroupedLinear):
    """`GroupedLinear` under a recipe, with the same parameter `weight`.

    A recipe whose operands are all casts runs grouped GEMMs; the others go expert by expert, for which the host has to
    know how many tokens each expert got. On a CPU it does; on another device the emulation waits for it.

    Attributes:
        precision: How each expert computes; random streams are named `<layer>.<expert>`.
        position: Shared by all quantized modules of a model.
        amax: The largest amax over experts, fp32 [1], of each quantized operand in the newest step, by name.
    """

    def __init__(self, grouped: GroupedLinear, *, precision: LinearPrecision, position: RoundingPosition) -> None:
        with torch.device("meta"):
            super().__init__(
                grouped.num_experts, grouped.in_features, grouped.out_features, uses_per_token=grouped.uses_per_token
            )
        self.weight = grouped.weight
        self.train(grouped.training)
        self.precision = precision
        self.position = position
        self.amax: dict[str, Tensor] = {}
        self._amax_step: dict[str, int] = {}
        self._slices: tuple[Tensor, tuple[Tensor, ...]] | None = None
        self._caches = [WeightCache() for _ in range(grouped.num_experts)]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """Multiply each token by the transposed weight of its expert; not compiled, as in QuantizedLinear.

        Args:
            x: [T, in_features], sorted by expert.
            ends: [num_experts] int32, the end of each expert's tokens.

        Returns:
            [T, out_features], dtype of x.
        """
        recipe = self.precision.high_precision if self.position.high_precision else self.precision.recipe
        if not recipe.is_quantized and _is_cast_to(recipe, x.dtype):
            return grouped_linear(x, self.weight, ends)
        if self.weight.requires_grad and self.weight.dtype is not torch.float32:
            self.weight.grad_dtype = torch.float32  # as in QuantizedLinear
        bounds = [0, *ends.tolist()]
        rounders = {
            expert: self._rounder(recipe, expert)
            for expert in range(self.num_experts)
            if bounds[expert] < bounds[expert + 1]
        }
        call = ExpertsCall(
            rounders=rounders,
            bounds=bounds,
            multiple=recipe.dim_multiple,
            gemm=self.precision.gemm,
            module=self,
            weight_version=self.position.weight_version,
            has_backward=torch.is_grad_enabled(),
        )
        y: Tensor = ExpertsFunction.apply(x, self.weight, call)  # type: ignore[no-untyped-call]
        return y

    def extra_repr(self) -> str:
        """Add the recipe to what `print(model)` shows."""
        return f"{super().extra_repr()}, recipe={self.precision.recipe_name}"

    def stored_weight(
        self, name: str, weight: Tensor, expert: int, *, rounder: OperandRounder, version: int
    ) -> StoredOperand:
        """Return `fprop.w` or `dgrad.w` of one expert, from its cache."""
        # The cache tells parameters apart by object: slices are made once per parameter and share its version counter.
        if self._slices is None or self._slices[0] is not weight:
            self._slices = (weight, weight.detach().unbind())
        return self._caches[expert].operand(name, self._slices[1][expert], rounder=rounder, version=version)

    def _rounder(self, recipe: LinearRecipe, expert: int) -> OperandRounder:
        position = self.position
        return OperandRounder(
            layer=f"{self.precision.layer}.{expert}",
            specs=recipe.operands,
            seed=position.seed,
            step=position.step,
            # An expert gets each token of a microbatch at most once, so microbatches draw from rows of their own.
            offsets={"tokens": position.row_offset, "inputs": 0, "outputs": 0},
            reduce_amax=_keep,
            record=partial(self._record_amax, position.step),
        )

    def _record_amax(self, step: int, name: str, amax: Tensor) -> None:
        largest = amax.amax(dim=0, keepdim=True)
        before = self.amax[name] if self._amax_step.get(name) == step else largest
        self.amax[name] = torch.maximum(before, largest)  # in any case: a recomputed forward runs the same operations
        self._amax_step[name] = step

    def _forget(self) -> None:
        self._slices = None
        for cache in self._caches:
            cache.clear()

    def _apply(self, *args: Any, **kwargs: Any) -> "QuantizedExperts":
        self._forget()  # a move to another device or dtype is seen by no counter
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._forget()
        super()._load_from_state_dict(*args, **kwargs)


@dataclass(frozen=True, kw_only=True)
class ExpertsCall:
    """What one forward fixes, for itself and for its backward.

    Args:
        rounders: Of each expert that has tokens.
        bounds: Where each expert's tokens start, and the end of the last.
        multiple: What the number of rows of an operand must be a multiple of.
        gemm: How operands are multiplied.
        module: Whose weights are cached.
        weight_version: The caller's counter of weight changes.
        has_backward: Whether autograd records this call.
    """

    rounders: dict[int, OperandRounder]
    bounds: list[int]
    multiple: int
    gemm: GemmMode
    module: QuantizedExperts
    weight_version: int
    has_backward: bool

    def rows(self, expert: int) -> slice:
        """Return the rows of an expert's tokens."""
        return slice(self.bounds[expert], self.bounds[expert + 1])

    def padded(self, tokens: Tensor, expert: int) -> Tensor:
        """Return an expert's tokens of [T, N], with zero rows up to the multiple."""
        own = tokens[self.rows(expert)]
        return F.pad(own, (0, 0, 0, -len(own) % self.multiple))

    def weight(self, name: str, weight: Tensor, expert: int) -> StoredOperand:
        """Return `fprop.w` or `dgrad.w` of one expert."""
        return self.module.stored_weight(
            name, weight, expert, rounder=self.rounders[expert], version=self.weight_version
        )


class ExpertsFunction(torch.autograd.Function):
    """The three GEMMs of every expert that has tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, call: ExpertsCall) -> Tensor:
        """Return y [T, out_features] for x [T, in_features] and keep packed what the gradients need."""
        y = x.new_empty(len(x), weight.shape[1])
        needs_dx, needs_dw = (needed and call.has_backward for needed in ctx.needs_input_grad[:2])
        kept: list[StoredOperand] = []
        for expert, rounder in call.rounders.items():
            tokens = call.padded(x, expert)
            product = exact_gemm(
                rounder.round("fprop.x", tokens),
                call.weight("fprop.w", weight, expert).to_gemm_operand(),
                mode=call.gemm,
                out_dtype=x.dtype,
            )
            y[call.rows(expert)] = product[: call.bounds[expert + 1] - call.bounds[expert]]
            if needs_dx:
                kept.append(call.weight("dgrad.w", weight, expert))
            if needs_dw:
                kept.append(rounder.store("wgrad.x", tokens))
        ctx.call, ctx.x_dtype, ctx.weight_shape = call, x.dtype, weight.shape
        ctx.save_for_backward(*(tensor for operand in kept for tensor in operand.tensors))
        ctx.operands = [(replace(operand, tensors=()), len(operand.tensors)) for operand in kept]
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Return dx in the dtype of x and dw in FP32, each only if it is needed."""
        call: ExpertsCall = ctx.call
        tensors = iter(ctx.saved_tensors)
        operands = iter(
            [operand.with_tensors(tuple(next(tensors) for _ in range(count))) for operand, count in ctx.operands]
        )
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        num_experts, out_features, in_features = ctx.weight_shape
        dx = dy.new_empty(len(dy), in_features, dtype=ctx.x_dtype) if needs_dx else None
        dw = dy.new_zeros(num_experts, out_features, in_features, dtype=torch.float32) if needs_dw else None
        for expert, rounder in call.rounders.items():
            own = call.padded(dy, expert).contiguous()
            if dx is not None:
                product = exact_gemm(
                    rounder.round("dgrad.dy", own),
                    next(operands).to_gemm_operand(),
                    mode=call.gemm,
                    out_dtype=ctx.x_dtype,
                )
                dx[call.rows(expert)] = product[: call.bounds[expert + 1] - call.bounds[expert]]
            if dw is not None:
                dw[expert] = exact_gemm(
                    rounder.round("wgrad.dy", own),
                    next(operands).to_gemm_operand(),
                    mode=call.gemm,
                    out_dtype=torch.float32,
                )
        return dx, dw, None


def _is_cast_to(recipe: LinearRecipe, dtype: torch.dtype) -> bool:
    """Whether grouped GEMMs in the dtype of the activations are what the recipe asks for."""
    wanted = {torch.bfloat16: Format.bf16, torch.float32: Format.fp32}.get(dtype)
    return all(spec.format is wanted for spec in recipe.operands.values())


def _keep(amax: Tensor) -> Tensor:
    return amax
