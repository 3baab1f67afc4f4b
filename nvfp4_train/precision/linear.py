"""A Linear whose three GEMMs each round their two operands as a recipe says.

    fprop  y  = x  w^T     contracts the input features
    dgrad  dx = dy w       contracts the output features
    wgrad  dw = dy^T x     contracts the tokens

Every recipe runs this code: in BF16 and FP32 the operands are casts. Between forward and backward only packed operands
are kept: x as wgrad will contract it and w as dgrad will, not the activations they came from.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from nvfp4_train.config.recipe import LinearRecipe
from nvfp4_train.model.linear import DeferGradient, now_or_later
from nvfp4_train.model.part import WHOLE, ParameterPart
from nvfp4_train.numerics.spec import GemmMode
from nvfp4_train.precision.amax_history import AmaxHistory
from nvfp4_train.precision.arriving_weight import ArrivingWeight
from nvfp4_train.precision.linear_rows import LinearCall
from nvfp4_train.precision.operands import OperandRounder
from nvfp4_train.precision.position import RoundingPosition
from nvfp4_train.precision.row_groups import RowGroups
from nvfp4_train.precision.weight_cache import WeightCache, is_shared


@dataclass(frozen=True, kw_only=True)
class LinearPrecision:
    """How one Linear computes.

    Args:
        layer: Its name in the whole model; part of its random streams.
        recipe_name: What the coverage report and error messages call `recipe`.
        recipe: The table of training.
        high_precision: The table of the compute dtype, for evaluation without rounding.
        gemm: How operands are multiplied.
    """

    layer: str
    recipe_name: str
    recipe: LinearRecipe
    high_precision: LinearRecipe
    gemm: GemmMode


class QuantizedLinear(nn.Linear):
    """`nn.Linear` under a recipe, with the same parameters `weight` and `bias`.

    Activations go in and out in their own dtype. Gradients of the parameters are FP32, whatever the dtype of the
    parameters that a forward sees. With a tensor-parallel shard, the caller sets the attributes below.

    Attributes:
        precision: How it computes.
        position: Shared by all QuantizedLinears of a model.
        reduce_amax: Makes ranks that hold parts of one operand agree on its amax: from the operand's name ("fprop.x")
            and fp32 [1] or [R] to the same shape.
        part: How to compute with the parts of the parameters that are held here; `in_features` and `out_features` are
            those of the part.
        output_dtype: Dtype of the results, for sums over ranks that are not to be rounded before; None: that of x.
        adds_bias: Whether it adds its bias; only one of the ranks whose results are summed does.
        group_rows: Output features of a group, which are not quantized together with others; 0: no groups.
        row_offset: Global index of the first output feature held here.
        column_offset: Global index of the first input feature held here.
        defer_gradient: Takes the gradient of the weight in a backward, to compute it later; None: at once.
        saved_bytes: What the newest forward with a backward kept of its input.
        amax: The largest amax, fp32 [1], of each quantized operand in the newest step, by name; filled without a sync.
            Formats that need none (mx) leave none.
        amax_history: Maxima of older steps, for the operands that scale by them.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        precision: LinearPrecision,
        position: RoundingPosition,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=torch.float32)
        self.precision = precision
        self.position = position
        self.reduce_amax: Callable[[str, Tensor], Tensor] = keep_amax
        self.part: ParameterPart = WHOLE
        self.output_dtype: torch.dtype | None = None
        self.adds_bias = True
        self.group_rows = 0
        self.row_offset = 0
        self.column_offset = 0
        self.defer_gradient: DeferGradient | None = None
        self.saved_bytes = 0
        self.amax: dict[str, Tensor] = {}
        self._amax_step: dict[str, int] = {}
        self._weights = WeightCache()
        self.amax_history = history_of(precision.recipe)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, precision: LinearPrecision, position: RoundingPosition
    ) -> "QuantizedLinear":
        """Return a QuantizedLinear that holds the very parameters of `linear`, on any device, meta included."""
        quantized = cls(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            precision=precision,
            position=position,
            device="meta",
        )
        quantized.weight, quantized.bias = linear.weight, linear.bias
        quantized.group_rows = getattr(linear, "group_rows", 0)
        return quantized.train(linear.training)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        """Return x w^T + bias; a graph of its own under `torch.compile`, because the position changes every step.

        Args:
            x: [..., in_features]; the leading dims together are the tokens, a multiple of the recipe's block.

        Returns:
            [..., out_features], dtype of x unless another is set.

        Raises:
            ValueError: for a number of tokens that the blocks of the recipe do not divide, naming the layer.
        """
        is_high = self.position.high_precision
        recipe = self.precision.high_precision if is_high else self.precision.recipe
        tokens = x.reshape(-1, self.in_features)
        self._check_tokens(tokens.shape[0], recipe.token_multiple)
        # FSDP2 hands out BF16 parameters, whose gradients autograd would round to BF16 before it adds them up.
        for parameter in (self.weight, self.bias):
            if parameter is not None and parameter.requires_grad and parameter.dtype is not torch.float32:
                parameter.grad_dtype = torch.float32
        groups = RowGroups.of(self.group_rows, recipe)
        call = LinearCall(
            recipe=recipe,
            rounder=self._rounder(recipe, first_output=groups.padded_index(self.row_offset)),
            gemm=self.precision.gemm,
            weights=self._weights,
            weight_version=self.position.weight_version,
            has_backward=torch.is_grad_enabled(),
            record_saved=self._record_saved,
            groups=groups,
            y_dtype=self.output_dtype,
            part=self.part,
            adds_bias=self.adds_bias,
            defer=self.defer_gradient,
        )
        y: Tensor = LinearFunction.apply(tokens, self.weight, self.bias, call)  # type: ignore[no-untyped-call]
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Add the recipe to what `print(model)` shows."""
        return f"{super().extra_repr()}, recipe={self.precision.recipe_name}"

    def receive_weight(self, arriving: ArrivingWeight) -> None:
        """Take the weight from there from now on; the parameter keeps its shape and its gradient, and has no values."""
        self._weights.arriving = arriving

    def _rounder(self, recipe: LinearRecipe, *, first_output: int) -> OperandRounder:
        position = self.position
        return OperandRounder(
            layer=self.precision.layer,
            specs=recipe.operands,
            seed=position.seed,
            step=position.step,
            offsets={"tokens": position.row_offset, "inputs": self.column_offset, "outputs": first_output},
            reduce_amax=self.reduce_amax,
            record=partial(self._record_amax, position.step),
            history=self.amax_history,
            is_training=torch.is_grad_enabled(),
            token_segment=position.segment,
            token_stride=position.stride,
        )

    def _record_amax(self, step: int, name: str, amax: Tensor) -> None:
        """Keep the maximum over a step, which keeps a NaN of any of its microbatches."""
        largest = amax.amax().reshape(1)  # of rows or chunks of 128, with FP32 scales of those
        before = self.amax[name] if self._amax_step.get(name) == step else largest
        self.amax[name] = torch.maximum(before, largest)  # in any case: a recomputed forward runs the same operations
        self._amax_step[name] = step

    def _record_saved(self, num_bytes: int) -> None:
        self.saved_bytes = num_bytes

    def _check_tokens(self, num_tokens: int, multiple: int) -> None:
        if num_tokens % multiple:
            raise ValueError(
                f"{self.precision.layer}: found {num_tokens} tokens, recipe {self.precision.recipe_name} "
                f"needs a multiple of {multiple}; change the sequence length or the micro batch size"
            )

    def _apply(self, *args: Any, **kwargs: Any) -> "QuantizedLinear":
        self._weights.clear()  # a move to another device or dtype is seen by no counter
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._weights.clear()  # under FSDP2 the values go to the shard, whose counter the unsharded weight does not see
        super()._load_from_state_dict(*args, **kwargs)


class LinearFunction(torch.autograd.Function):
    """The three GEMMs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall) -> Tensor:
        """Return y [T, out_features] for x [T, in_features] and keep what the gradients that are asked for need."""
        needs_dx, needs_dw = (needed and call.has_backward for needed in ctx.needs_input_grad[:2])
        local = call.part.local(weight)
        y, saved = call.forward(x, local, needs_dx=needs_dx, needs_dw=needs_dw)
        y = call.groups.crop(y, dim=1)
        if bias is not None and call.adds_bias:
            y += call.part.local(bias).to(y.dtype)
        ctx.call = call
        ctx.weight = None if call.defer is None else weight
        ctx.x_dtype = x.dtype
        ctx.gradients = [None if parameter is None else call.part.gradient(parameter) for parameter in (weight, bias)]
        ctx.save_for_backward(*saved.tensors)
        ctx.saved = saved.without_tensors()
        if needs_dx or needs_dw:
            call.record_saved(saved.num_input_bytes(local))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        """Return dx in the dtype of x, dw and the bias gradient in FP32, each only if it is needed.

        Without dw where that is deferred: the pass of a pipeline that computes gradients of inputs has no use for it.
        """
        needs_dx, needs_dw, needs_dbias = ctx.needs_input_grad[:3]
        call: LinearCall = ctx.call
        dw_of, dbias_of = ctx.gradients
        dy = dy.contiguous()
        saved = ctx.saved.with_tensors(ctx.saved_tensors)
        padded = call.groups.pad(dy, dim=1)
        dx, wgrad = call.backward(padded, saved, needs_dx=needs_dx, needs_dw=needs_dw, x_dtype=ctx.x_dtype)
        compute = partial(_gradient_of_part, dw_of, call.groups, wgrad)
        dw = now_or_later(compute, ctx.weight, defer=call.defer) if needs_dw else None
        dbias = dbias_of(dy.sum(dim=0, dtype=torch.float32)) if needs_dbias else None
        return dx, dw, dbias, None


def _gradient_of_part(of_part: Callable[[Tensor], Tensor], groups: RowGroups, wgrad: Callable[[], Tensor]) -> Tensor:
    """Compute the gradient of a weight's part, without the rows that fill up its groups, as the parameter's."""
    return of_part(groups.crop(wgrad(), dim=0))


def history_of(recipe: LinearRecipe) -> AmaxHistory:
    """Return an empty history for the operands of a recipe that scale by one."""
    specs = recipe.operands
    lengths = {name: spec.amax_history_length for name, spec in specs.items() if spec.amax_history_length}
    if is_shared(specs):
        lengths.pop("dgrad.w", None)
    return AmaxHistory(lengths)


def keep_amax(_: str, amax: Tensor) -> Tensor:
    """Return the amax of a rank that holds whole operands."""
    return amax
