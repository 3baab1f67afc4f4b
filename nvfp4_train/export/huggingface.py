"""Read Hugging Face folders of NemotronH and Mamba2."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from nvfp4_train.config.model import (
    AttentionConfig,
    MambaConfig,
    MlpConfig,
    ModelConfig,
    MtpConfig,
    NormGroup,
    Position,
)
from nvfp4_train.config.moe import Activation, MoeConfig, RouterScore
from nvfp4_train.export.names import PREFIX, import_state

LETTERS = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-", "moe": "E"}
HEAD, EMBEDDING = "lm_head.weight", f"{PREFIX}.embeddings.weight"
ACTIVATIONS = {"relu2": Activation.squared_relu, "gelu": Activation.gelu}
# transformers does not write what has its default value.
NEMOTRON_H_DEFAULTS: dict[str, Any] = {
    "vocab_size": 131072,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "intermediate_size": 21504,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "rescale_prenorm_residual": True,
    "n_groups": 8,
    "conv_kernel": 4,
    "chunk_size": 128,
    "use_conv_bias": True,
    "use_bias": False,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "time_step_min": 0.001,
    "time_step_max": 0.1,
    "time_step_floor": 1e-4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "moe_latent_size": None,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model read from disk: its configuration and the parameters of ``HybridLM(cfg)``."""

    cfg: ModelConfig
    state: dict[str, Tensor]


def load_huggingface(folder: Path) -> LoadedModel:
    """Read ``config.json`` and the weights: ``model.safetensors``, or the shards that its index names.

    Raises:
        ValueError: for a folder without these files, and for a model type, an option or a tensor that ``HybridLM``
            does not have.
    """
    cfg = model_config(_read_json(folder / "config.json"))
    tensors = load_weights(folder)
    head, embedding = (tensors.get(name) for name in (HEAD, EMBEDDING))
    if cfg.tie_embeddings and head is not None and (embedding is None or not torch.equal(head, embedding)):
        cfg = replace(cfg, tie_embeddings=False)  # transformers 5.18 ties nothing in NemotronH, whatever the key says
    return LoadedModel(cfg=cfg, state=import_state(tensors, cfg))


def load_weights(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a folder, whether in one file or in shards.

    Raises:
        ValueError: naming the file that is missing or broken.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return load_tensors(single)
    if not index.is_file():
        raise ValueError(f"{folder} holds neither {single.name} nor {index.name}")
    shards = sorted(set(_read_json(index)["weight_map"].values()))
    return {name: tensor for shard in shards for name, tensor in load_tensors(folder / shard).items()}


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read one safetensors file.

    Raises:
        ValueError: if it is missing or broken.
    """
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from error


def model_config(theirs: Mapping[str, Any]) -> ModelConfig:
    """Translate a ``config.json``.

    The clamp on dt is the one that transformers (5.18) applies: NemotronH floors dt at ``time_step_min`` and ignores
    ``time_step_limit`` (huggingface/transformers#48989), Mamba2 honours the limit.

    Raises:
        ValueError: for a model type, a missing key or an option that ``HybridLM`` does not have.
    """
    try:
        match theirs.get("model_type"):
            case "nemotron_h":
                return _nemotron_h(NEMOTRON_H_DEFAULTS | dict(theirs))
            case "mamba2":
                return _mamba2(theirs)
    except KeyError as error:
        raise ValueError(f"config.json: {error.args[0]} is missing") from error
    raise ValueError(f"config.json: model_type must be nemotron_h or mamba2, got {theirs.get('model_type')!r}")


def _nemotron_h(theirs: Mapping[str, Any]) -> ModelConfig:
    _require(theirs, {"mamba_hidden_act": ("silu",), "mlp_hidden_act": tuple(ACTIVATIONS)})
    pattern = theirs.get("hybrid_override_pattern")
    if pattern is None:
        pattern = "".join(_letter(name) for name in theirs["layers_block_type"])
    if "E" in pattern:  # the projections to the latent and the shared expert would have one, the experts not
        _require(theirs, {"mlp_bias": (False,)})
    mamba = _mamba_config(
        theirs,
        num_heads=theirs["mamba_num_heads"],
        d_head=theirs["mamba_head_dim"],
        d_state=theirs["ssm_state_size"],
        norm_group=NormGroup.group,
        dt_limit=(theirs["time_step_min"], float("inf")),
    )
    attention = _plain_attention(
        num_heads=theirs["num_attention_heads"],
        num_kv_heads=theirs["num_key_value_heads"],
        d_head=theirs["head_dim"],
    )
    mlp = MlpConfig(
        d_ff=theirs["intermediate_size"],
        activation=ACTIVATIONS[theirs["mlp_hidden_act"]],
        bias=theirs["mlp_bias"],
    )
    return ModelConfig(
        **_outer(theirs, pattern=pattern), mamba=mamba, attention=attention, mlp=mlp, moe=_moe_config(theirs)
    )


def _mamba2(theirs: Mapping[str, Any]) -> ModelConfig:
    _require(theirs, {"hidden_act": ("silu",)})
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
    return ModelConfig(
        **_outer(theirs, pattern="M" * theirs["num_hidden_layers"]),
        mamba=mamba,
        attention=_plain_attention(num_heads=1, num_kv_heads=1, d_head=16),
        mlp=MlpConfig(d_ff=theirs["hidden_size"], activation=Activation.squared_relu, bias=False),
        moe=_moe_config(NEMOTRON_H_DEFAULTS | {"mlp_hidden_act": "relu2"}),
    )


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
        proj_bias=theirs["use_bias"],
        norm_group=norm_group,
        # These shape the initialization only, where 0 has no logarithm: a floor of 0 at run time is fine.
        dt_init_min=theirs["time_step_min"] or theirs["time_step_floor"],
        dt_init_max=theirs["time_step_max"],
        dt_init_floor=min(theirs["time_step_floor"], theirs["time_step_min"] or theirs["time_step_floor"]),
        dt_min=dt_limit[0],
        dt_max=dt_limit[1],
    )


def _plain_attention(*, num_heads: int, num_kv_heads: int, d_head: int) -> AttentionConfig:
    """NemotronH's attention: no positions, no norms, and no biases, whatever ``attention_bias`` says."""
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        d_head=d_head,
        position=Position.none,
        rope_theta=10000.0,
        qk_norm=False,
        window_tokens=0,
        qkv_bias=False,
        output_bias=False,
    )


def _moe_config(theirs: Mapping[str, Any]) -> MoeConfig:
    return MoeConfig(
        num_experts=theirs["n_routed_experts"],
        top_k=theirs["num_experts_per_tok"],
        d_ff=theirs["moe_intermediate_size"],
        # transformers always has a shared expert; 0 gives it the width of an MLP block.
        shared_d_ff=theirs["moe_shared_expert_intermediate_size"] or theirs["intermediate_size"],
        d_latent=theirs["moe_latent_size"] or 0,
        activation=ACTIVATIONS[theirs["mlp_hidden_act"]],
        score=RouterScore.sigmoid,
        num_groups=theirs["n_group"],
        top_groups=theirs["topk_group"],
        normalize_weights=theirs["norm_topk_prob"],
        routed_scaling=theirs["routed_scaling_factor"],
        bias_update_rate=0.0,
        auxiliary_loss_weight=0.0,
        z_loss_weight=0.0,
    )


def _outer(theirs: Mapping[str, Any], *, pattern: str) -> dict[str, Any]:
    """The fields of ``ModelConfig`` that are no block's.

    NemotronH keeps the residual stream in the model's dtype whatever ``residual_in_fp32`` says (transformers 5.18).
    """
    return {
        "pattern": pattern,
        "d_model": theirs["hidden_size"],
        "vocab_size": theirs["vocab_size"],
        "norm_eps": theirs["layer_norm_epsilon"],
        "tie_embeddings": theirs["tie_word_embeddings"],
        "init_std": theirs["initializer_range"],
        "rescale_prenorm_residual": theirs["rescale_prenorm_residual"],
        "residual_fp32": theirs["model_type"] == "mamba2" and theirs["residual_in_fp32"],
        "mtp": MtpConfig(loss_weight=0.0, share_depths=False),
    }


def _require(theirs: Mapping[str, Any], accepted: Mapping[str, tuple[Any, ...]]) -> None:
    for key, values in accepted.items():
        if theirs.get(key, values[0]) not in values:
            wanted = " or ".join(repr(value) for value in values)
            raise ValueError(f"config.json: {key} must be {wanted}, got {theirs[key]!r}")


def _letter(name: str) -> str:
    if name not in LETTERS:
        raise ValueError(f"config.json: layers_block_type must hold {', '.join(LETTERS)}, got {name!r}")
    return LETTERS[name]


def _number(value: float | dict[str, str]) -> float:
    """Read a number; transformers writes infinity as ``{"__float__": "Infinity"}``."""
    return float(value["__float__"]) if isinstance(value, dict) else float(value)


def _read_json(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
