"""The part of a model that one tensor- and expert-parallel rank holds, as a model of its own."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nvfp4_train.analysis.plan.layout import Layout
from nvfp4_train.config.model import ModelConfig
from nvfp4_train.config.pattern import LayerKind
from nvfp4_train.config.recipe import KeepBf16, RecipeConfig
from nvfp4_train.model.hybrid import HybridLM, build_model
from nvfp4_train.model.linear import GroupedLinear, Linear
from nvfp4_train.model.moe import Moe
from nvfp4_train.model.mtp import MtpDepth
from nvfp4_train.precision.apply import apply_precision
from nvfp4_train.precision.coverage import CoverageRow

HEAD = "lm_head"


@dataclass(frozen=True, kw_only=True)
class BlockKey:
    """What makes two blocks cost the same: their mixer, and which of its Linears stay in the compute dtype."""

    kind: LayerKind
    kept: frozenset[str]

    @property
    def is_kept(self) -> bool:
        """Whether some Linear stays."""
        return bool(self.kept)


@dataclass(frozen=True, kw_only=True)
class ModelKeys:
    """The blocks of a model by what they cost.

    Args:
        blocks: Of the main model, in order.
        mtp: Of one multi-token-prediction depth.
        kept_ends: The Linears outside blocks that stay: ``lm_head``, ``eh_proj``.
    """

    blocks: tuple[BlockKey, ...]
    mtp: tuple[BlockKey, ...]
    kept_ends: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class BuiltModel:
    """A model on the meta device after the precision pass.

    Args:
        model: Its modules.
        coverage: What each Linear runs.
    """

    model: HybridLM
    coverage: list[CoverageRow]


def build_on_meta(model_cfg: ModelConfig, recipe_cfg: RecipeConfig, *, tp: int = 1) -> BuiltModel:
    """Build a model without memory, as an engine does before it spreads it over ranks.

    Args:
        model_cfg: Its shapes; with `tp`, those of `local_config`.
        recipe_cfg: What its Linears run.
        tp: Ranks of which the model is one's part, for the Linears whose widths no configuration can name.

    Raises:
        ConfigError: where shapes or rules do not fit the recipe.
    """
    with torch.device("meta"):
        model = build_model(model_cfg)
        if tp > 1:
            _divide_linears(model, tp=tp)
    coverage = apply_precision(model, recipe_cfg, seed=0).coverage
    if tp > 1:
        _stand_in_for_ranks(model, tp=tp)
    return BuiltModel(model=model, coverage=coverage)


def _divide_linears(model: HybridLM, *, tp: int) -> None:
    """Divide the Linears whose other side stays whole: into and out of the experts' width, and to an MTP depth."""
    for module in model.modules():
        if isinstance(module, Moe) and module.fc1_latent_proj is not None and module.fc2_latent_proj is not None:
            width, d_model = module.fc1_latent_proj.out_features // tp, module.fc2_latent_proj.out_features
            module.fc1_latent_proj, module.fc2_latent_proj = Linear(d_model, width), Linear(width, d_model)
        elif isinstance(module, MtpDepth):
            module.eh_proj = Linear(module.eh_proj.in_features // tp, module.eh_proj.out_features)


def _stand_in_for_ranks(model: HybridLM, *, tp: int) -> None:
    """Let a forward see the widths that the other ranks would bring, or take away."""
    for module in model.modules():
        if isinstance(module, Moe) and module.fc1_latent_proj is not None:
            _around(module.fc1_latent_proj, after=lambda y: torch.cat([y] * tp, dim=-1))
            _around(module.experts, after=lambda y: y.chunk(tp, dim=-1)[0].contiguous())
        elif isinstance(module, MtpDepth):
            _around(module.eh_proj, before=lambda x: x.chunk(tp, dim=-1)[0])


def _around(
    module: nn.Module,
    *,
    before: Callable[[Tensor], Tensor] = lambda x: x,
    after: Callable[[Tensor], Tensor] = lambda y: y,
) -> None:
    def run(forward: Callable[..., Tensor], x: Tensor, *others: Any) -> Tensor:
        return after(forward(before(x), *others))

    module.forward = partial(run, module.forward)


def local_config(model: ModelConfig, layout: Layout) -> ModelConfig:
    """Return the widths that a tp rank holds: its heads, groups, d_ff and vocabulary; experts are all still there."""
    tp = layout.tp
    mamba, attention = model.mamba, model.attention
    return replace(
        model,
        vocab_size=model.vocab_size // tp,
        mamba=replace(mamba, num_heads=mamba.num_heads // tp, num_groups=max(mamba.num_groups // tp, 1)),
        attention=replace(
            attention, num_heads=attention.num_heads // tp, num_kv_heads=max(attention.num_kv_heads // tp, 1)
        ),
        mlp=replace(model.mlp, d_ff=model.mlp.d_ff // tp),
        moe=replace(model.moe, d_ff=model.moe.d_ff // tp, shared_d_ff=model.moe.shared_d_ff // tp),
    )


def model_keys(built: BuiltModel, recipe: RecipeConfig) -> ModelKeys:
    """Return what each block of a built model is."""
    model = built.model
    kept = {row.module for row in built.coverage if row.recipe != recipe.name}
    return ModelKeys(
        blocks=tuple(
            BlockKey(kind=kind, kept=_below(f"blocks.{index}.mixer.", kept))
            for index, kind in enumerate(model.cfg.layer_kinds)
        ),
        mtp=tuple(
            BlockKey(kind=kind, kept=_below(f"mtp.0.blocks.{index}.mixer.", kept))
            for index, kind in enumerate(model.cfg.layer_pattern.mtp)
        ),
        kept_ends=frozenset(name for name in (HEAD, "eh_proj") if name in kept or f"mtp.0.{name}" in kept),
    )


def _below(prefix: str, names: set[str]) -> frozenset[str]:
    return frozenset(name.removeprefix(prefix) for name in names if name.startswith(prefix))


def local_block(key: BlockKey, model: ModelConfig, recipe: RecipeConfig, *, layout: Layout) -> BuiltModel:
    """Build, on the meta device, a model with one block as a rank of the layout holds it.

    Raises:
        ConfigError: where the local widths do not fit the recipe.
    """
    cfg = replace(local_config(model, layout), pattern=key.kind.value, tie_embeddings=True)
    keep = KeepBf16(
        first_blocks=0, last_blocks=0, modules=[f"blocks.0.mixer.{name}" for name in sorted(key.kept)], mtp=False
    )
    return build_on_meta(cfg, replace(recipe, keep_bf16=keep), tp=layout.tp)


def local_ends(model: ModelConfig, recipe: RecipeConfig, *, layout: Layout, has_head: bool = False) -> BuiltModel:
    """Build a model with one MLP block and everything that lies outside blocks, as a tp rank holds it.

    Args:
        model: The whole model.
        recipe: Its recipe; Linears outside blocks run in it what they run in the model.
        layout: Whose tp it is.
        has_head: Whether the head is a Linear of its own even where it shares the embedding's weight; then in the
            compute dtype, as it is multiplied there.

    Raises:
        ConfigError: where the local widths do not fit the recipe.
    """
    pattern = model.layer_pattern
    tail = f"/{''.join(pattern.mtp)}" * pattern.num_mtp_depths
    tied = model.tie_embeddings and not has_head
    cfg = replace(local_config(model, layout), pattern=LayerKind.mlp.value + tail, tie_embeddings=tied)
    with torch.device("meta"):
        modules = build_model(cfg).named_modules()
    names = [name for name, module in modules if isinstance(module, nn.Linear | GroupedLinear)]
    globs = recipe.keep_bf16.modules + ([HEAD] if has_head and model.tie_embeddings else [])
    kept = [glob for glob in globs if any(fnmatchcase(name, glob) for name in names)]
    keep = KeepBf16(first_blocks=0, last_blocks=0, modules=kept, mtp=recipe.keep_bf16.mtp)
    return build_on_meta(cfg, replace(recipe, keep_bf16=keep), tp=layout.tp)
