"""Recipes: which operand of which GEMM is rounded how, and which Linears stay in BF16."""

from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter

from nvfp4_train.config.problem import Rule, check, not_negative
from nvfp4_train.numerics.spec import BLOCK_SIZE, Block, GemmMode, OperandSpec, Rounding


class ComputeDtype(StrEnum):
    """Dtype of activations and of the weights that GEMMs see; masters are always FP32."""

    fp32 = "fp32"
    bf16 = "bf16"


@dataclass(kw_only=True, slots=True)
class FpropRow:
    """Operands of y = x w^T, contracted over the input features."""

    x: OperandSpec
    w: OperandSpec


@dataclass(kw_only=True, slots=True)
class DgradRow:
    """Operands of dx = dy w, contracted over the output features."""

    dy: OperandSpec
    w: OperandSpec


@dataclass(kw_only=True, slots=True)
class WgradRow:
    """Operands of dw = dy^T x, contracted over the tokens; a Hadamard transform here runs along the tokens."""

    x: OperandSpec
    dy: OperandSpec

    def __post_init__(self) -> None:
        check(
            self,
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
    """The three GEMMs of a Linear."""

    fprop: FpropRow
    dgrad: DgradRow
    wgrad: WgradRow

    def __post_init__(self) -> None:
        check(self, *(self._no_hadamard(name) for name in ("fprop.x", "fprop.w", "dgrad.dy", "dgrad.w")))

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
    def is_quantized(self) -> bool:
        """Whether any operand leaves the compute dtype."""
        return any(spec.is_quantized for spec in self.operands.values())

    @property
    def dim_multiple(self) -> int:
        """Number that in_features, out_features and tokens must be multiples of."""
        sizes = [BLOCK_SIZE.get(spec.block, 1) for spec in self.operands.values() if spec.block is not Block.none]
        return max(sizes, default=1)

    @property
    def is_stochastic(self) -> bool:
        """Whether any operand draws random bits."""
        return any(spec.rounding is Rounding.stochastic for spec in self.operands.values())


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
    """A precision recipe: one table for every Linear that is not kept."""

    name: str
    compute_dtype: ComputeDtype
    gemm: GemmMode
    linear: LinearRecipe
    keep_bf16: KeepBf16
