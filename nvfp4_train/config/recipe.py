"""Recipes: which operand of which GEMM is rounded how, and which Linears stay in BF16."""

from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from typing import Any

from nvfp4_train.config.problem import Rule, check, not_negative
from nvfp4_train.numerics.spec import DIM_MULTIPLE, EXTENSION_PATH, GemmMode, OperandSpec


class ComputeDtype(StrEnum):
    """Dtype of activations and of the weights that GEMMs see; masters are always FP32."""

    fp32 = "fp32"
    bf16 = "bf16"


@dataclass(kw_only=True, slots=True)
class FpropRow:
    """Operands of y = x w^T, contracted over the input features.

    In every row, `gemm` is the import path of a function that computes it in place of the built-in GEMM on rounded
    operands, and `args` its further keyword arguments.
    """

    x: OperandSpec
    w: OperandSpec
    gemm: str | None = None
    args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        check(self, *_extension_rules(self, "gemm", "args"))


@dataclass(kw_only=True, slots=True)
class DgradRow:
    """Operands of dx = dy w, contracted over the output features."""

    dy: OperandSpec
    w: OperandSpec
    gemm: str | None = None
    args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        check(self, *_extension_rules(self, "gemm", "args"))


@dataclass(kw_only=True, slots=True)
class WgradRow:
    """Operands of dw = dy^T x, contracted over the tokens; a Hadamard transform here runs along the tokens."""

    x: OperandSpec
    dy: OperandSpec
    gemm: str | None = None
    args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        check(
            self,
            *_extension_rules(self, "gemm", "args"),
            Rule(
                "x.hadamard_size",
                lambda: self.x.hadamard_size == self.dy.hadamard_size,
                lambda: (
                    f"both wgrad operands need the same transform (dy has {self.dy.hadamard_size}), so that it cancels"
                ),
                "set hadamard_size alike on x and dy",
            ),
            Rule(
                "x.hadamard_signs",
                lambda: self.x.hadamard_signs is self.dy.hadamard_signs,
                lambda: (
                    f"both wgrad operands need the same signs (dy has {self.dy.hadamard_signs}), so that they cancel"
                ),
                "set hadamard_signs alike on x and dy",
            ),
        )


@dataclass(kw_only=True, slots=True)
class LinearRecipe:
    """The three GEMMs of a Linear.

    `pair` is the import path of an object whose `forward` and `backward` compute a Linear in place of the three rows,
    and `args` their further keyword arguments.
    """

    fprop: FpropRow
    dgrad: DgradRow
    wgrad: WgradRow
    pair: str | None = None
    args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        check(
            self,
            *_extension_rules(self, "pair", "args"),
            *(self._no_hadamard(name) for name in ("fprop.x", "fprop.w", "dgrad.dy", "dgrad.w")),
        )

    def _no_hadamard(self, name: str) -> Rule:
        return Rule(
            f"{name}.hadamard_size",
            lambda: attrgetter(name)(self).hadamard_size == 0,
            "a Hadamard transform runs along the tokens of wgrad only",
            "set it on wgrad.x and wgrad.dy",
        )

    @property
    def operands(self) -> dict[str, OperandSpec]:
        """The six cells by name (``fprop.x``)."""
        return {
            "fprop.x": self.fprop.x,
            "fprop.w": self.fprop.w,
            "dgrad.dy": self.dgrad.dy,
            "dgrad.w": self.dgrad.w,
            "wgrad.x": self.wgrad.x,
            "wgrad.dy": self.wgrad.dy,
        }

    @property
    def weight_gather_problem(self) -> str | None:
        """Why ranks cannot send each other the quantized weight in place of its values, or None."""
        spec = self.fprop.w
        if not spec.is_quantized:
            return "its weight is not quantized"
        has_outside = self.pair is not None or any(row.gemm is not None for row in (self.fprop, self.dgrad, self.wgrad))
        if has_outside or spec.quantizer is not None:
            return "code from outside the recipe reads its weight"
        if spec != self.dgrad.w or not spec.is_direction_free:
            return "fprop and dgrad quantize its weight in two ways"
        if spec.amax_history_length:
            return "its weight is scaled by maxima of older steps"
        return None

    @property
    def is_quantized(self) -> bool:
        """Whether any operand leaves the compute dtype."""
        return any(spec.is_quantized for spec in self.operands.values())

    @property
    def dim_multiple(self) -> int:
        """Number that in_features and out_features must be multiples of."""
        return DIM_MULTIPLE if self.is_quantized else 1

    @property
    def token_multiple(self) -> int:
        """Number that the tokens of a microbatch must be a multiple of: groups of a Hadamard transform are whole."""
        return max(self.dim_multiple, *(spec.hadamard_size for spec in self.operands.values()))


@dataclass(kw_only=True, slots=True)
class KeepBf16:
    """Linears that stay in the compute dtype.

    Args:
        first_blocks: Number of leading blocks (letters of the pattern) whose Linears all stay.
        last_blocks: The same for trailing blocks.
        modules: Globs over module names (``lm_head``, ``blocks.*.mixer.out_proj``); one that matches nothing is an
            error.
        mtp: Whether all Linears of the multi-token-prediction depths stay; first and last blocks do not count them.
    """

    first_blocks: int
    last_blocks: int
    modules: list[str]
    mtp: bool = True

    def __post_init__(self) -> None:
        check(self, *not_negative(self, "first_blocks", "last_blocks"))


@dataclass(kw_only=True, slots=True)
class RecipeConfig:
    """A precision recipe: one table for every Linear that is not kept.

    `after_optimizer` is the import path of a function that is called with the model and the step after each optimizer
    step, and `after_optimizer_args` its further keyword arguments.
    """

    name: str
    compute_dtype: ComputeDtype
    gemm: GemmMode
    linear: LinearRecipe
    keep_bf16: KeepBf16
    after_optimizer: str | None = None
    after_optimizer_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        check(self, *_extension_rules(self, "after_optimizer", "after_optimizer_args"))


def _extension_rules(cfg: object, path: str, args: str) -> list[Rule]:
    """Rules of a key that names code and of the key that holds its arguments."""
    return [
        Rule(
            path,
            lambda: getattr(cfg, path) is None or EXTENSION_PATH.fullmatch(getattr(cfg, path)) is not None,
            "must be an import path",
            "write package.module:name",
        ),
        Rule(
            args,
            lambda: getattr(cfg, path) is not None or getattr(cfg, args) is None,
            f"are given to what {path} names, and it is null",
            f"set {path}, or leave {args} out",
        ),
    ]
