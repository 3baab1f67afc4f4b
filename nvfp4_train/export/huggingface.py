"""Read Hugging Face folders of NemotronH and Mamba2."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from nvfp4_train.config.model import (
    Activation,
    AttentionConfig,
    MambaConfig,
    MlpConfig,
    ModelConfig,
    NormGroup,
    Position,
)
from nvfp4_train.export.names import import_state

LETTERS = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-", "moe": "E"}


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model read from disk: its configuration and the parameters of ``HybridLM(cfg)``."""

    cfg: ModelConfig
    state: dict[str, Tensor]


def load_huggingface(folder: Path) -> LoadedModel:
    """Read ``config.json`` and ``model.safetensors``.

    Raises:
        ValueError: for a model type, an option or a tensor that ``HybridLM`` does not have.
    """
    cfg = model_config(json.loads((folder / "config.json").read_text()))
    return LoadedModel(cfg=cfg, state=import_state(load_file(folder / "model.safetensors"), cfg))


def model_config(theirs: Mapping[str, Any]) -> ModelConfig:
    """Translate a ``config.json``.

    The clamp on dt is the one that transformers (5.18) applies: NemotronH floors dt at ``time_step_min`` and ignores
    ``time_step_limit`` (huggingface/transformers#48989), Mamba2 honours the limit.

    Raises:
        ValueError: for a model type or an option that ``HybridLM`` does not have.
    """
    match theirs["model_type"]:
        case "nemotron_h":
            return _nemotron_h(theirs)
        case "mamba2":
            return _mamba2(theirs)
        case other:
            raise ValueError(f"model_type must be nemotron_h or mamba2, got {other!r}")


def _nemotron_h(theirs: Mapping[str, Any]) -> ModelConfig:
    _require_plain(
        theirs, {"use_bias": False, "mlp_bias": False, "mamba_hidden_act": "silu", "mlp_hidden_act": "relu2"}
    )
    pattern = theirs.get("hybrid_override_pattern")
    if pattern is None:
        pattern = "".join(LETTERS[kind] for kind in theirs["layers_block_type"])
    mamba = _mamba_config(
        theirs,
        num_heads=theirs["mamba_num_heads"],
        d_head=theirs["mamba_head_dim"],
        d_state=theirs["ssm_state_size"],
        norm_group=NormGroup.group,
        dt_limit=(theirs["time_step_min"], float("inf")),
    )
    attention = AttentionConfig(
        num_heads=theirs["num_attention_heads"],
        num_kv_heads=theirs["num_key_value_heads"],
        d_head=theirs["head_dim"],
        position=Position.none,
        rope_theta=10000.0,
    )
    mlp = MlpConfig(d_ff=theirs["intermediate_size"], activation=Activation.squared_relu)
    return _assemble(theirs, pattern=pattern, mamba=mamba, attention=attention, mlp=mlp)


def _mamba2(theirs: Mapping[str, Any]) -> ModelConfig:
    _require_plain(theirs, {"use_bias": False, "hidden_act": "silu"})
    low, high = (_number(limit) for limit in theirs["time_step_limit"])
    mamba = _mamba_config(
        theirs,
        num_heads=theirs["num_heads"],
        d_head=theirs["head_dim"],
        d_state=theirs["state_size"],
        norm_group=NormGroup.whole,
        dt_limit=(low, high),
    )
    # A pure Mamba model has no block of these kinds; the widths are placeholders that the configuration accepts.
    attention = AttentionConfig(num_heads=1, num_kv_heads=1, d_head=16, position=Position.none, rope_theta=10000.0)
    mlp = MlpConfig(d_ff=theirs["hidden_size"], activation=Activation.squared_relu)
    return _assemble(theirs, pattern="M" * theirs["num_hidden_layers"], mamba=mamba, attention=attention, mlp=mlp)


def _mamba_config(
    theirs: Mapping[str, Any],
    *,
    num_heads: int,
    d_head: int,
    d_state: int,
    norm_group: NormGroup,
    dt_limit: tuple[float, float],
) -> MambaConfig:
    return MambaConfig(
        num_heads=num_heads,
        d_head=d_head,
        d_state=d_state,
        num_groups=theirs["n_groups"],
        d_conv=theirs["conv_kernel"],
        chunk_size=theirs["chunk_size"],
        conv_bias=theirs["use_conv_bias"],
        norm_group=norm_group,
        dt_init_min=theirs["time_step_min"],
        dt_init_max=theirs["time_step_max"],
        dt_init_floor=theirs["time_step_floor"],
        dt_min=dt_limit[0],
        dt_max=dt_limit[1],
    )


def _assemble(
    theirs: Mapping[str, Any], *, pattern: str, mamba: MambaConfig, attention: AttentionConfig, mlp: MlpConfig
) -> ModelConfig:
    return ModelConfig(
        pattern=pattern,
        d_model=theirs["hidden_size"],
        vocab_size=theirs["vocab_size"],
        norm_eps=theirs["layer_norm_epsilon"],
        tie_embeddings=theirs["tie_word_embeddings"],
        init_std=theirs["initializer_range"],
        rescale_prenorm_residual=theirs["rescale_prenorm_residual"],
        mamba=mamba,
        attention=attention,
        mlp=mlp,
    )


def _require_plain(theirs: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for key, value in expected.items():
        if theirs.get(key, value) != value:
            raise ValueError(f"config.json: {key} must be {value!r}, got {theirs[key]!r}")


def _number(value: float | dict[str, str]) -> float:
    """Read a number; transformers writes infinity as ``{"__float__": "Infinity"}``."""
    return float(value["__float__"]) if isinstance(value, dict) else float(value)
