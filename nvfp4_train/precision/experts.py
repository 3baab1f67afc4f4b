"""The Linears of a mixture of experts under a recipe.

Each expert is a Linear of its own: its tokens are one tensor with its own amax and its own random stream, and its
weight is another. Tokens are padded with zero rows to the recipe's multiple, which changes neither an amax nor a sum.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from nvfp4_train.config.recipe import LinearRecipe
from nvfp4_train.model.linear import DeferGradient, GroupedLinear, grouped_linear, now_or_later
from nvfp4_train.model.part import WHOLE, ParameterPart
from nvfp4_train.numerics.spec import Format
from nvfp4_train.precision.linear import LinearPrecision, history_of, keep_amax
from nvfp4_train.precision.linear_rows import LinearCall, Saved
from nvfp4_train.precision.operands import OperandRounder
from nvfp4_train.precision.position import RoundingPosition
from nvfp4_train.precision.weight_cache import WeightCache

_CAST_DTYPE = {Format.bf16: torch.bfloat16, Format.fp32: torch.float32}


class QuantizedExperts(GroupedLinear):
    """`GroupedLinear` under a recipe, with the same parameter `weight`.

    A recipe whose operands are all casts runs grouped GEMMs; the others go expert by expert, for which the host has to
    know how many tokens each expert got. On a CPU it does; on another device the emulation waits for it.

    Attributes:
        precision: How each expert computes; random streams are named `<layer>.<expert>`.
        position: Shared by all quantized modules of a model.
        first_expert: Index of the first expert held here, of which there are `num_experts`.
        num_sources: Ranks whose tokens come to these experts; 1: only those of this rank.
        reduce_amax: Makes ranks that hold parts of one operand of an expert agree on its amax, see QuantizedLinear;
            called for experts that have tokens.
        part: How to compute with the part of the weight that is held here, see QuantizedLinear.
        output_dtype: Dtype of the results; None: that of x.
        row_offset: Global index of the first output feature held here, of every expert.
        column_offset: Global index of the first input feature held here.
        defer_gradient: Takes the gradient of the weight in a backward, to compute it later; None: at once.
        saved_bytes: What the newest forward with a backward kept of its input.
        amax: The largest amax over experts, fp32 [1], of each quantized operand in the newest step, by name.
        amax_history: Maxima of older steps over all experts, for the operands that scale by them.
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
        self.reduce_amax: Callable[[str, Tensor], Tensor] = keep_amax
        self.part: ParameterPart = WHOLE
        self.output_dtype: torch.dtype | None = None
        self.first_expert = 0
        self.num_sources = 1
        self.row_offset = 0
        self.column_offset = 0
        self.defer_gradient: DeferGradient | None = None
        self.saved_bytes = 0
        self.amax: dict[str, Tensor] = {}
        self.amax_history = history_of(precision.recipe)
        self._amax_step: dict[str, int] = {}
        self._caches = [WeightCache() for _ in range(grouped.num_experts)]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """Multiply each token by the transposed weight of its expert; not compiled, as in QuantizedLinear.

        Args:
            x: [T, in_features], sorted by expert.
            ends: [num_experts] int32, the end of each expert's tokens.

        Returns:
            [T, out_features], dtype of x unless another is set.
        """
        recipe = self.precision.high_precision if self.position.high_precision else self.precision.recipe
        dtype = _cast_dtype(recipe)
        if dtype is not None and dtype in (x.dtype, self.output_dtype):
            cast = grouped_linear(x.to(dtype), self.weight, ends, part=self.part, defer=self.defer_gradient)
            return cast.to(self.output_dtype or dtype)
        if self.weight.requires_grad and self.weight.dtype is not torch.float32:
            self.weight.grad_dtype = torch.float32  # as in QuantizedLinear
        bounds = [0, *ends.tolist()]
        linears = {
            expert: self._linear_call(recipe, expert)
            for expert in range(self.num_experts)
            if bounds[expert] < bounds[expert + 1]
        }
        call = ExpertsCall(
            linears=linears,
            weights=self._expert_weights(),
            bounds=bounds,
            multiple=recipe.token_multiple,
            y_dtype=self.output_dtype or x.dtype,
            defer=self.defer_gradient,
        )
        if torch.is_grad_enabled():
            self.saved_bytes = 0
        y: Tensor = ExpertsFunction.apply(x, self.weight, call, self.part)  # type: ignore[no-untyped-call]
        return y

    def extra_repr(self) -> str:
        """Add the recipe to what `print(model)` shows."""
        return f"{super().extra_repr()}, recipe={self.precision.recipe_name}"

    def _linear_call(self, recipe: LinearRecipe, expert: int) -> LinearCall:
        position = self.position
        rounder = OperandRounder(
            layer=f"{self.precision.layer}.{self.first_expert + expert}",
            specs=recipe.operands,
            seed=position.seed,
            step=position.step,
            # An expert gets each token of a microbatch at most once, so microbatches draw from rows of their own, and
            # so do ranks that hold other slices of the sequences. With tokens of several ranks there are as many times
            # more rows.
            offsets={
                "tokens": position.row_offset * self.num_sources,
                "inputs": self.column_offset,
                "outputs": self.row_offset,
            },
            reduce_amax=self.reduce_amax,
            record=partial(self._record_amax, position.step),
            history=self.amax_history,
            is_training=torch.is_grad_enabled(),
            token_segment=position.segment * self.num_sources,
            token_stride=position.stride * self.num_sources,
        )
        return LinearCall(
            recipe=recipe,
            rounder=rounder,
            gemm=self.precision.gemm,
            weights=self._caches[expert],
            weight_version=position.weight_version,
            has_backward=torch.is_grad_enabled(),
            record_saved=self._add_saved,
            y_dtype=self.output_dtype,
        )

    def _expert_weights(self) -> tuple[Tensor, ...]:
        # New slices, which share the version counter: ZeRO 3 gathers the parameter into other memory each time, and
        # slices that are kept would keep the old one alive.
        with torch.no_grad():
            local = self.part.local(self.weight)
        for cache in self._caches:
            cache.parameter = local
        return local.detach().unbind()

    def _add_saved(self, num_bytes: int) -> None:
        self.saved_bytes += num_bytes

    def _record_amax(self, step: int, name: str, amax: Tensor) -> None:
        largest = amax.amax().reshape(1)
        before = self.amax[name] if self._amax_step.get(name) == step else largest
        self.amax[name] = torch.maximum(before, largest)  # in any case: a recomputed forward runs the same operations
        self._amax_step[name] = step

    def _forget(self) -> None:
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
        linears: Of each expert that has tokens, the call of its Linear.
        weights: [out_features, in_features] of every expert.
        bounds: Where each expert's tokens start, and the end of the last.
        multiple: What the number of rows of an operand must be a multiple of.
        y_dtype: Dtype of the results.
        defer: Takes the gradient of all weights together, to compute it later; None: at once.
    """

    linears: dict[int, LinearCall]
    weights: tuple[Tensor, ...]
    bounds: list[int]
    multiple: int
    y_dtype: torch.dtype
    defer: DeferGradient | None = None

    def rows(self, expert: int) -> slice:
        """Return the rows of an expert's tokens."""
        return slice(self.bounds[expert], self.bounds[expert + 1])

    def num_tokens(self, expert: int) -> int:
        """Return how many tokens an expert got."""
        return self.bounds[expert + 1] - self.bounds[expert]

    def padded(self, tokens: Tensor, expert: int) -> Tensor:
        """Return an expert's tokens of [T, N], with zero rows up to the multiple."""
        own = tokens[self.rows(expert)]
        return F.pad(own, (0, 0, 0, -len(own) % self.multiple)).contiguous()


class ExpertsFunction(torch.autograd.Function):
    """The three GEMMs of every expert that has tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, call: ExpertsCall, part: ParameterPart) -> Tensor:
        """Return y [T, out_features] for x [T, in_features] and keep packed what the gradients need."""
        shape = call.weights[0].shape
        y = x.new_empty(len(x), shape[0], dtype=call.y_dtype)
        kept: list[Saved] = []
        for expert, linear in call.linears.items():
            own = call.weights[expert]
            needs_dx, needs_dw = (needed and linear.has_backward for needed in ctx.needs_input_grad[:2])
            product, saved = linear.forward(call.padded(x, expert), own, needs_dx=needs_dx, needs_dw=needs_dw)
            y[call.rows(expert)] = product[: call.num_tokens(expert)]
            if needs_dx or needs_dw:
                linear.record_saved(saved.num_input_bytes(own))
            kept.append(saved)
        ctx.call, ctx.x_dtype, ctx.weight_shape = call, x.dtype, (len(call.weights), *shape)
        ctx.gradient = part.gradient(weight)
        ctx.weight = None if call.defer is None else weight
        ctx.save_for_backward(*(tensor for saved in kept for tensor in saved.tensors))
        ctx.saved = [(saved.without_tensors(), len(saved.tensors)) for saved in kept]
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """Return dx in the dtype of x and dw in FP32, each only if it is needed, and dw only if it is not deferred."""
        call: ExpertsCall = ctx.call
        tensors = iter(ctx.saved_tensors)
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        dx = dy.new_empty(len(dy), ctx.weight_shape[2], dtype=ctx.x_dtype) if needs_dx else None
        wgrads: dict[int, Callable[[], Tensor]] = {}
        for (expert, linear), (saved, count) in zip(call.linears.items(), ctx.saved, strict=True):
            own_dx, wgrads[expert] = linear.backward(
                call.padded(dy, expert),
                saved.with_tensors(tuple(next(tensors) for _ in range(count))),
                needs_dx=needs_dx,
                needs_dw=needs_dw,
                x_dtype=ctx.x_dtype,
            )
            if dx is not None and own_dx is not None:
                dx[call.rows(expert)] = own_dx[: call.num_tokens(expert)]
        compute = partial(_stacked, wgrads, of_part=ctx.gradient, shape=ctx.weight_shape, device=dy.device)
        return dx, now_or_later(compute, ctx.weight, defer=call.defer) if needs_dw else None, None, None


def _stacked(
    wgrads: dict[int, Callable[[], Tensor]],
    *,
    of_part: Callable[[Tensor], Tensor],
    shape: tuple[int, ...],
    device: torch.device,
) -> Tensor:
    """Return the gradient of all weights, FP32, with zeros for experts without tokens."""
    dw = torch.zeros(shape, dtype=torch.float32, device=device)
    for expert, compute in wgrads.items():
        dw[expert] = compute()
    return of_part(dw)


def _cast_dtype(recipe: LinearRecipe) -> torch.dtype | None:
    """Return the dtype in which grouped GEMMs are what the recipe asks for, or None."""
    formats = {spec.format for spec in recipe.operands.values()}
    return _CAST_DTYPE.get(formats.pop()) if len(formats) == 1 else None
