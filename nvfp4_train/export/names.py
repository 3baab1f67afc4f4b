"""One table between our parameters and those of Hugging Face's NemotronH and Mamba2, read in both directions."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4_train.config.model import AttentionConfig, MambaConfig, ModelConfig
from nvfp4_train.config.moe import Activation, MoeConfig, RouterScore
from nvfp4_train.config.pattern import LayerKind

PREFIX = "backbone"  # on disk; what transformers, ModelOpt, vLLM and TensorRT-LLM write and read
MTP_PREFIX = "mtp."  # of multi-token prediction, in both; transformers has no such modules and skips these tensors


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One of our parameters and the tensors that hold it elsewhere.

    Args:
        ours: Parameter name in ``HybridLM``.
        theirs: Their tensors, in the order in which they are concatenated along dim 0.
        order: [rows] int64: row i of their concatenation is our row ``order[i]``; None if the rows agree.
        rows: Rows of each of their tensors.
        is_conv: Whether they hold [C, 1, K] where we hold [C, K].
        is_stacked: Whether each of their tensors is one slice of ours along a dim of its own, instead of some rows.
    """

    ours: str
    theirs: tuple[str, ...]
    order: Tensor | None = None
    rows: tuple[int, ...] = ()
    is_conv: bool = False
    is_stacked: bool = False

    def export_value(self, value: Tensor) -> dict[str, Tensor]:
        """Turn our tensor into theirs."""
        if self.order is not None:
            value = value[self.order.to(value.device)]
        if self.is_conv:
            value = value.unsqueeze(1)
        if self.is_stacked:
            parts = value.unbind()
        else:
            parts = value.split(self.rows) if self.rows else (value,)
        return {name: part.contiguous() for name, part in zip(self.theirs, parts, strict=True)}

    def import_value(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Turn their tensors into ours."""
        parts = [tensors[name] for name in self.theirs]
        value = torch.stack(parts) if self.is_stacked else torch.cat(parts)
        if self.is_conv:
            value = value.squeeze(1)
        return value if self.order is None else value[self.order.argsort().to(value.device)]


def name_table(cfg: ModelConfig) -> list[Entry]:
    """List every parameter and buffer of ``HybridLM(cfg)`` with its Hugging Face counterpart.

    NemotronH and Mamba2 agree on every name that both have. Multi-token prediction is left out.

    Raises:
        ValueError: for a model that these formats cannot hold (a SwiGLU MLP, attention with RoPE).
    """
    entries = [Entry(ours="embedding.weight", theirs=(f"{PREFIX}.embeddings.weight",))]
    for index, kind in enumerate(cfg.layer_kinds):
        ours, theirs = f"blocks.{index}", f"{PREFIX}.layers.{index}"
        entries.append(Entry(ours=f"{ours}.norm.weight", theirs=(f"{theirs}.norm.weight",)))
        entries += _mixer_entries(kind, cfg=cfg, ours=f"{ours}.mixer", theirs=f"{theirs}.mixer")
    entries.append(Entry(ours="final_norm.weight", theirs=(f"{PREFIX}.norm_f.weight",)))
    if not cfg.tie_embeddings:
        entries.append(Entry(ours="lm_head.weight", theirs=("lm_head.weight",)))
    return entries


def export_state(state: Mapping[str, Tensor], cfg: ModelConfig) -> dict[str, Tensor]:
    """Rename and reorder the parameters of ``HybridLM(cfg)`` as Hugging Face stores them.

    Multi-token prediction is left out: transformers has no modules for it.

    Raises:
        ValueError: if ``state`` lacks a parameter or holds an unknown one.
    """
    table = name_table(cfg)
    state = {name: tensor for name, tensor in state.items() if not name.startswith(MTP_PREFIX)}
    _require_names(state, [entry.ours for entry in table])
    exported: dict[str, Tensor] = {}
    for entry in table:
        exported |= entry.export_value(state[entry.ours])
    return exported


def import_state(tensors: Mapping[str, Tensor], cfg: ModelConfig) -> dict[str, Tensor]:
    """Rename and reorder Hugging Face's tensors into the parameters of ``HybridLM(cfg)``.

    The prefix ``model.`` is accepted for ``backbone.``. Tensors of multi-token prediction are skipped, as transformers
    does.

    Raises:
        ValueError: if a tensor is missing or unknown.
    """
    tensors = {
        f"{PREFIX}.{name.removeprefix('model.')}" if name.startswith("model.") else name: t
        for name, t in tensors.items()
        if not name.startswith(MTP_PREFIX)
    }
    if cfg.tie_embeddings:
        tensors.pop("lm_head.weight", None)
    table = name_table(cfg)
    _require_names(tensors, [name for entry in table for name in entry.theirs])
    return {entry.ours: entry.import_value(tensors) for entry in table}


def _mixer_entries(kind: LayerKind, *, cfg: ModelConfig, ours: str, theirs: str) -> list[Entry]:
    match kind:
        case LayerKind.mamba:
            return _mamba_entries(cfg.mamba, ours=ours, theirs=theirs)
        case LayerKind.attention:
            return _attention_entries(cfg.attention, ours=ours, theirs=theirs)
        case LayerKind.mlp:
            return _linears(ours, theirs, _mlp_names(cfg.mlp.activation), bias=cfg.mlp.bias)
        case LayerKind.moe:
            return _moe_entries(cfg.moe, ours=ours, theirs=theirs)


def _mamba_entries(cfg: MambaConfig, *, ours: str, theirs: str) -> list[Entry]:
    heads = cfg.num_heads // cfg.num_groups
    inner = heads * cfg.d_head
    project = _parts_first((inner, inner, cfg.d_state, cfg.d_state, heads), num_groups=cfg.num_groups)
    convolve = _parts_first((inner, cfg.d_state, cfg.d_state), num_groups=cfg.num_groups)
    entries = [
        Entry(ours=f"{ours}.in_proj.weight", theirs=(f"{theirs}.in_proj.weight",), order=project),
        Entry(ours=f"{ours}.conv1d.weight", theirs=(f"{theirs}.conv1d.weight",), order=convolve, is_conv=True),
    ]
    if cfg.conv_bias:
        entries.append(Entry(ours=f"{ours}.conv1d.bias", theirs=(f"{theirs}.conv1d.bias",), order=convolve))
    if cfg.proj_bias:
        entries.append(Entry(ours=f"{ours}.in_proj.bias", theirs=(f"{theirs}.in_proj.bias",), order=project))
    entries += [Entry(ours=f"{ours}.scan.{name}", theirs=(f"{theirs}.{name}",)) for name in ("A_log", "D", "dt_bias")]
    return [
        *entries,
        *_same(ours, theirs, ("norm.weight",)),
        *_linears(ours, theirs, ("out_proj",), bias=cfg.proj_bias),
    ]


def _attention_entries(cfg: AttentionConfig, *, ours: str, theirs: str) -> list[Entry]:
    plain = {"position": "none", "qk_norm": False, "window_tokens": 0, "qkv_bias": False, "output_bias": False}
    for option, value in plain.items():
        if getattr(cfg, option) != value:
            raise ValueError(f"NemotronH has attention with {option} = {value!r} only, got {getattr(cfg, option)!r}")
    query = cfg.num_heads // cfg.num_kv_heads * cfg.d_head
    qkv = Entry(
        ours=f"{ours}.qkv_proj.weight",
        theirs=tuple(f"{theirs}.{letter}_proj.weight" for letter in "qkv"),
        order=_parts_first((query, cfg.d_head, cfg.d_head), num_groups=cfg.num_kv_heads),
        rows=tuple(rows * cfg.num_kv_heads for rows in (query, cfg.d_head, cfg.d_head)),
    )
    return [qkv, *_same(ours, theirs, ("o_proj.weight",))]


def _moe_entries(cfg: MoeConfig, *, ours: str, theirs: str) -> list[Entry]:
    if cfg.score is not RouterScore.sigmoid:
        raise ValueError(f"NemotronH has sigmoid routers only, got {cfg.score}")
    names = _mlp_names(cfg.activation)
    entries = [
        Entry(ours=f"{ours}.router.{name}", theirs=(f"{theirs}.gate.{name}",))
        for name in ("weight", "e_score_correction_bias")
    ]
    entries += [
        Entry(
            ours=f"{ours}.experts.{name}.weight",
            theirs=tuple(f"{theirs}.experts.{index}.{name}.weight" for index in range(cfg.num_experts)),
            is_stacked=True,
        )
        for name in names
    ]
    if cfg.shared_d_ff:
        entries += _same(ours, theirs, tuple(f"shared_experts.{name}.weight" for name in names))
    if cfg.d_latent:
        entries += _same(ours, theirs, ("fc1_latent_proj.weight", "fc2_latent_proj.weight"))
    return entries


def _mlp_names(activation: Activation) -> tuple[str, str]:
    if activation is Activation.swiglu:
        raise ValueError("NemotronH holds MLPs without a gate only, got swiglu")
    return ("up_proj", "down_proj")


def _linears(ours: str, theirs: str, names: tuple[str, ...], *, bias: bool) -> list[Entry]:
    parameters = ("weight", "bias") if bias else ("weight",)
    return _same(ours, theirs, tuple(f"{name}.{parameter}" for name in names for parameter in parameters))


def _same(ours: str, theirs: str, names: tuple[str, ...]) -> list[Entry]:
    return [Entry(ours=f"{ours}.{name}", theirs=(f"{theirs}.{name}",)) for name in names]


def _parts_first(rows: tuple[int, ...], *, num_groups: int) -> Tensor:
    """Return the order that gathers each part over the groups, from rows stored group by group, part by part."""
    stored = torch.arange(num_groups * sum(rows)).view(num_groups, sum(rows))
    return torch.cat([part.reshape(-1) for part in stored.split(rows, dim=1)])


def _require_names(found: Mapping[str, Tensor], expected: list[str]) -> None:
    missing = sorted(set(expected) - set(found))
    unknown = sorted(set(found) - set(expected))
    if missing or unknown:
        raise ValueError(f"the tensors do not fit the model: missing {missing}, unknown {unknown}")
