"""Which widths of a model a recipe's blocks must divide, as far as the configuration tells them.

The precision pass checks the same on real modules; here a wrong width is reported together with every other mistake.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from nvfp4_train.config.model import Activation, ModelConfig
from nvfp4_train.config.pattern import LayerKind, known_kinds
from nvfp4_train.config.recipe import KeepBf16


@dataclass(frozen=True)
class Width:
    """A width that a key decides.

    Args:
        key: Dotted key below the root that a user would change.
        value: The width.
        meaning: What it is.
        linears: Globs over the names of the Linears that have it as rows or columns.
    """

    key: str
    value: Callable[[ModelConfig], int]
    meaning: str
    linears: tuple[str, ...]


def _in_proj_rows(model: ModelConfig) -> int:
    cfg = model.mamba
    return 2 * cfg.d_inner + 2 * cfg.num_groups * cfg.d_state + cfg.num_heads


WIDTHS = (
    Width("model.d_model", lambda model: model.d_model, "the residual stream", ("*",)),
    Width(
        "model.mamba.num_heads",
        _in_proj_rows,
        "rows of in_proj, 2 * num_heads * d_head + 2 * num_groups * d_state + num_heads",
        ("*.in_proj",),
    ),
    Width(
        "model.mamba.d_head",
        lambda model: model.mamba.d_inner,
        "columns of out_proj, num_heads * d_head",
        ("*.out_proj",),
    ),
    Width(
        "model.attention.num_kv_heads",
        lambda model: (model.attention.num_heads + 2 * model.attention.num_kv_heads) * model.attention.d_head,
        "rows of qkv_proj, (num_heads + 2 * num_kv_heads) * d_head",
        ("*.qkv_proj",),
    ),
    Width(
        "model.attention.d_head",
        lambda model: model.attention.num_heads * model.attention.d_head,
        "columns of o_proj, num_heads * d_head",
        ("*.o_proj",),
    ),
    Width("model.mlp.d_ff", lambda model: model.mlp.d_ff, "the MLP", ("*.up_proj", "*.gate_proj", "*.down_proj")),
    Width("model.vocab_size", lambda model: model.vocab_size, "rows of lm_head", ("lm_head",)),
)


def quantized_linears(model: ModelConfig, keep: KeepBf16) -> list[str]:
    """Return the names of the Linears that ``keep`` leaves to the recipe, without blocks whose letter is unknown."""
    num_blocks = len(model.pattern)
    names = [
        f"blocks.{index}.mixer.{linear}"
        for index, kind in known_kinds(model.pattern).items()
        if keep.first_blocks <= index < num_blocks - keep.last_blocks
        for linear in _mixer_linears(kind, model)
    ]
    names += [] if model.tie_embeddings else ["lm_head"]
    return [name for name in names if not any(fnmatchcase(name, glob) for glob in keep.modules)]


def _mixer_linears(kind: LayerKind, model: ModelConfig) -> tuple[str, ...]:
    match kind:
        case LayerKind.mamba:
            return ("in_proj", "out_proj")
        case LayerKind.attention:
            return ("qkv_proj", "o_proj")
        case LayerKind.mlp:
            gated = model.mlp.activation is Activation.swiglu
            return ("gate_proj", "up_proj", "down_proj") if gated else ("up_proj", "down_proj")
