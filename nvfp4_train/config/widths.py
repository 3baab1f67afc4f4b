"""Which widths of a model a recipe's blocks must divide, as far as the configuration tells them.

The precision pass checks the same on real modules; here a wrong width is reported together with every other mistake.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from nvfp4_train.config.model import ModelConfig
from nvfp4_train.config.moe import Activation
from nvfp4_train.config.pattern import DEPTH, LayerKind, count_blocks, known_kinds, known_mtp_kinds
from nvfp4_train.config.recipe import KeepBf16


@dataclass(frozen=True)
class Width:
    """A width that a key decides.

    Args:
        key: Dotted key below the root that a user would change.
        value: The width.
        meaning: What it is.
        linears: Globs over the names of the Linears that have it as rows or columns.
        is_split: Whether the ranks of tp hold a part of it each.
        units: What the ranks hold equally many of then; None: the width itself.
        group: Rows that are quantized apart from others, and filled up where they are not whole blocks.
    """

    key: str
    value: Callable[[ModelConfig], int]
    meaning: str
    linears: tuple[str, ...]
    is_split: bool = True
    units: Callable[[ModelConfig], int] | None = None
    group: Callable[[ModelConfig], int] | None = None

    def divides_among(self, model: ModelConfig, *, ranks: int) -> bool:
        """Whether the ranks of tp can hold equal parts; where they cannot, that is what is wrong."""
        return (self.units or self.value)(model) % ranks == 0

    def is_filled_up(self, model: ModelConfig, *, multiple: int) -> bool:
        """Whether quantization fills the width up to whole blocks, so that none of its values is wrong."""
        return self.group is not None and self.group(model) % multiple != 0


def _in_proj_rows(model: ModelConfig) -> int:
    return model.mamba.num_groups * _in_proj_group(model)


def _in_proj_group(model: ModelConfig) -> int:
    cfg = model.mamba
    heads = cfg.num_heads // cfg.num_groups
    return 2 * heads * cfg.d_head + 2 * cfg.d_state + heads


WIDTHS = (
    Width("model.d_model", lambda model: model.d_model, "the residual stream", ("*",), is_split=False),
    Width("model.d_model", lambda model: 2 * model.d_model, "columns of eh_proj, 2 * d_model", ("*.eh_proj",)),
    Width(
        "model.mamba.num_heads",
        _in_proj_rows,
        "rows of in_proj, 2 * num_heads * d_head + 2 * num_groups * d_state + num_heads",
        ("*.in_proj",),
        units=lambda model: model.mamba.num_groups,
        group=_in_proj_group,
    ),
    Width(
        "model.mamba.d_head",
        lambda model: model.mamba.d_inner,
        "columns of out_proj, num_heads * d_head",
        ("*.out_proj",),
        units=lambda model: model.mamba.num_groups,
    ),
    Width(
        "model.attention.num_kv_heads",
        lambda model: (model.attention.num_heads + 2 * model.attention.num_kv_heads) * model.attention.d_head,
        "rows of qkv_proj, (num_heads + 2 * num_kv_heads) * d_head",
        ("*.qkv_proj",),
        units=lambda model: model.attention.num_kv_heads,
    ),
    Width(
        "model.attention.d_head",
        lambda model: model.attention.num_heads * model.attention.d_head,
        "columns of o_proj, num_heads * d_head",
        ("*.o_proj",),
        units=lambda model: model.attention.num_kv_heads,
    ),
    Width(
        "model.mlp.d_ff",
        lambda model: model.mlp.d_ff,
        "the MLP",
        ("*.mixer.up_proj", "*.mixer.gate_proj", "*.mixer.down_proj"),
    ),
    Width("model.moe.d_ff", lambda model: model.moe.d_ff, "a routed expert", ("*.experts.*",)),
    Width("model.moe.shared_d_ff", lambda model: model.moe.shared_d_ff, "the shared experts", ("*.shared_experts.*",)),
    Width(
        "model.moe.d_latent",
        lambda model: model.moe.d_latent,
        "what routed experts read and write",
        ("*.fc1_latent_proj", "*.fc2_latent_proj"),
    ),
    Width("model.vocab_size", lambda model: model.vocab_size, "rows of lm_head", ("lm_head",)),
)


def quantized_linears(model: ModelConfig, keep: KeepBf16) -> list[str]:
    """Return the names of the Linears that ``keep`` leaves to the recipe, without blocks whose letter is unknown."""
    num_blocks = count_blocks(model.pattern)
    names = [
        f"blocks.{index}.mixer.{linear}"
        for index, kind in known_kinds(model.pattern).items()
        if keep.first_blocks <= index < num_blocks - keep.last_blocks
        for linear in _mixer_linears(kind, model)
    ]
    names += [] if model.tie_embeddings else ["lm_head"]
    names += [] if keep.mtp else _mtp_linears(model)
    return [name for name in names if not any(fnmatchcase(name, glob) for glob in keep.modules)]


def _mtp_linears(model: ModelConfig) -> list[str]:
    num_depths = model.pattern.count(DEPTH)
    if not num_depths:
        return []
    inner = [
        f"blocks.{index}.mixer.{linear}"
        for index, kind in known_mtp_kinds(model.pattern).items()
        for linear in _mixer_linears(kind, model)
    ]
    own = range(1 if model.mtp.share_depths else num_depths)
    return [f"mtp.{depth}.{name}" for depth in own for name in ["eh_proj", *inner]]


def _mixer_linears(kind: LayerKind, model: ModelConfig) -> list[str]:
    match kind:
        case LayerKind.mamba:
            return ["in_proj", "out_proj"]
        case LayerKind.attention:
            return ["qkv_proj", "o_proj"]
        case LayerKind.mlp:
            return _mlp_linears(model.mlp.activation)
        case LayerKind.moe:
            names = [f"experts.{name}" for name in _mlp_linears(model.moe.activation)]
            if model.moe.shared_d_ff:
                names += [f"shared_experts.{name}" for name in _mlp_linears(model.moe.activation)]
            return names + (["fc1_latent_proj", "fc2_latent_proj"] if model.moe.d_latent else [])


def _mlp_linears(activation: Activation) -> list[str]:
    gate = ["gate_proj"] if activation is Activation.swiglu else []
    return [*gate, "up_proj", "down_proj"]
