"""The model: its layer pattern and the widths of its blocks."""

from dataclasses import dataclass
from enum import StrEnum
from math import inf

from nvfp4_train.config.moe import Activation, MoeConfig
from nvfp4_train.config.pattern import PATTERN_FIX, LayerKind, LayerPattern, pattern_fault
from nvfp4_train.config.problem import Rule, check, not_negative, positive


class NormGroup(StrEnum):
    """Channels over which the gated norm of a Mamba-2 block takes its mean square."""

    group = "group"  # each of num_groups apart (NemotronH)
    whole = "whole"  # the whole inner width (Mamba2ForCausalLM)


class Position(StrEnum):
    """Position encoding of attention."""

    none = "none"
    rope = "rope"


class MambaKernels(StrEnum):
    """What scans and convolves in a Mamba-2 block."""

    auto = "auto"  # mamba_ssm and causal_conv1d on CUDA where they import, else pytorch
    pytorch = "pytorch"  # this package: repeatable to the bit, and no bit passes between documents
    mamba_ssm = "mamba_ssm"  # mamba_ssm and causal_conv1d, or an error


@dataclass(kw_only=True, slots=True)
class MambaConfig:
    """Mamba-2 block; its inner width is ``num_heads * d_head``.

    ``conv_bias`` belongs to the convolution, ``proj_bias`` to in_proj and out_proj.
    ``dt_init_min``, ``dt_init_max`` and ``dt_init_floor`` shape the initialization only; ``dt_min`` and ``dt_max``
    clamp dt after softplus in every forward. ``kernels`` changes speed, and rounding.
    """

    num_heads: int
    d_head: int
    d_state: int
    num_groups: int
    d_conv: int
    chunk_size: int
    conv_bias: bool
    proj_bias: bool
    norm_group: NormGroup
    dt_init_min: float
    dt_init_max: float
    dt_init_floor: float
    dt_min: float
    dt_max: float
    kernels: MambaKernels = MambaKernels.auto

    def __post_init__(self) -> None:
        check(
            self,
            *positive(self, "num_heads", "d_head", "d_state", "num_groups", "d_conv", "chunk_size"),
            Rule(
                "num_heads",
                lambda: self.num_groups <= 0 or self.num_heads % self.num_groups == 0,
                lambda: f"must be a multiple of num_groups ({self.num_groups})",
                "change num_heads or num_groups",
            ),
            Rule(
                "dt_min",
                lambda: 0 <= self.dt_min <= self.dt_max,
                lambda: f"0 <= dt_min <= dt_max ({self.dt_max})",
                "use 0 and .inf for no limits",
            ),
            Rule(
                "dt_max",
                lambda: self.dt_max != 0,
                "must be above 0: with time steps of 0 the scan does nothing",
                "use .inf for no limit",
            ),
            Rule(
                "dt_init_min",
                lambda: 0 < self.dt_init_floor <= self.dt_init_min <= self.dt_init_max < inf,
                lambda: (
                    f"0 < dt_init_floor ({self.dt_init_floor}) <= dt_init_min ({self.dt_init_min})"
                    f" <= dt_init_max ({self.dt_init_max}), all finite"
                ),
                "the published values are 1e-4, 1e-3 and 0.1",
            ),
        )

    @property
    def d_inner(self) -> int:
        """Width of the scanned sequence."""
        return self.num_heads * self.d_head


@dataclass(kw_only=True, slots=True)
class AttentionConfig:
    """Grouped-query attention; key-value head j serves query heads ``j*r`` to ``j*r + r-1``.

    Args:
        num_heads: Query heads.
        num_kv_heads: Key-value heads.
        d_head: Width of a head.
        position: Position encoding.
        rope_theta: Base of the wavelengths, with rope only.
        qk_norm: Whether queries and keys are RMS-normalized per head, before the position encoding.
        window_tokens: Tokens that a query sees, itself included; 0: all of its document so far.
        qkv_bias: Whether the projection to queries, keys and values has a bias.
        output_bias: Whether the output projection has a bias.
    """

    num_heads: int
    num_kv_heads: int
    d_head: int
    position: Position
    rope_theta: float
    qk_norm: bool
    window_tokens: int
    qkv_bias: bool
    output_bias: bool

    def __post_init__(self) -> None:
        check(
            self,
            *positive(self, "num_heads", "num_kv_heads", "d_head", "rope_theta"),
            *not_negative(self, "window_tokens"),
            Rule(
                "num_heads",
                lambda: self.num_kv_heads <= 0 or self.num_heads % self.num_kv_heads == 0,
                lambda: f"must be a multiple of num_kv_heads ({self.num_kv_heads})",
                "change num_heads or num_kv_heads",
            ),
            Rule(
                "d_head",
                lambda: self.position is not Position.rope or self.d_head % 2 == 0,
                "must be even with rope",
                "use an even width",
            ),
        )


@dataclass(kw_only=True, slots=True)
class MlpConfig:
    """Feed-forward block; ``bias`` belongs to all of its projections."""

    d_ff: int
    activation: Activation
    bias: bool

    def __post_init__(self) -> None:
        check(self, *positive(self, "d_ff"))


@dataclass(kw_only=True, slots=True)
class MtpConfig:
    """Multi-token prediction; how many depths there are and of which blocks is in ``pattern``.

    Args:
        loss_weight: Weight of the mean over depths of their losses, beside the loss of the next token.
        share_depths: Whether all depths have the same weights.
    """

    loss_weight: float
    share_depths: bool

    def __post_init__(self) -> None:
        check(self, *not_negative(self, "loss_weight"))


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """A language model made of residual blocks, one letter of ``pattern`` each.

    Args:
        pattern: ``M`` Mamba-2, ``*`` attention, ``-`` MLP, ``E`` mixture of experts; ``|`` between pipeline segments,
            ``/`` before each multi-token-prediction depth.
        d_model: Width of the residual stream.
        vocab_size: Rows of the embedding and of the output head.
        norm_eps: Epsilon of every RMSNorm.
        tie_embeddings: Whether the output head shares the embedding's weight.
        init_std: Standard deviation of the normal initialization of matrices.
        rescale_prenorm_residual: Whether projections into the residual stream are divided by sqrt(number of blocks).
        residual_fp32: Whether the residual stream is FP32 whatever the activation dtype.
    """

    pattern: str
    d_model: int
    vocab_size: int
    norm_eps: float
    tie_embeddings: bool
    init_std: float
    rescale_prenorm_residual: bool
    residual_fp32: bool
    mamba: MambaConfig
    attention: AttentionConfig
    mlp: MlpConfig
    moe: MoeConfig
    mtp: MtpConfig

    def __post_init__(self) -> None:
        check(
            self,
            Rule(
                "pattern",
                lambda: not pattern_fault(self.pattern),
                lambda: pattern_fault(self.pattern),
                PATTERN_FIX,
            ),
            *positive(self, "d_model", "vocab_size", "norm_eps"),
            *not_negative(self, "init_std"),
        )

    @property
    def layer_pattern(self) -> LayerPattern:
        """The pattern, parsed."""
        return LayerPattern.parse(self.pattern)

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each block of the main model, in order."""
        return self.layer_pattern.layers
