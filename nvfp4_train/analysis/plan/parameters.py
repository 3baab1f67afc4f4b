"""The parameters of a rank, by the part of the model that they belong to, and what they weigh."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from nvfp4_train.analysis.plan.layout import Layout
from nvfp4_train.analysis.plan.local import HEAD, BlockKey, local_block, local_ends
from nvfp4_train.config.model import ModelConfig
from nvfp4_train.config.recipe import RecipeConfig
from nvfp4_train.model.linear import GroupedLinear
from nvfp4_train.precision.linear import LinearPrecision

MASTER_BYTES = 4  # FP32
EMBEDDING, FINAL_NORM, MTP = "embedding", "final_norm", "mtp"


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter as a tp and ep rank holds it, before it is sharded over data ranks.

    Args:
        name: In a model whose only block is the one it belongs to.
        shape: On the tp and ep rank.
        is_expert: Whether it is divided over ep.
        is_fp32: Whether modules read it in FP32, and not in the compute dtype.
        precision: Of the Linear that it is the weight of, if it is one's.
    """

    name: str
    shape: tuple[int, ...]
    is_expert: bool
    is_fp32: bool
    precision: LinearPrecision | None

    @property
    def numel(self) -> int:
        """Elements on the tp and ep rank."""
        return math.prod(self.shape)

    def shard(self, layout: Layout, *, index: int = 0) -> int:
        """Return the elements that data rank ``index`` keeps.

        FSDP divides the first dim into equal runs of rows; the last ranks may have fewer, or none. Experts that are
        fewer than the ranks are divided along their output features, where these make equal parts.

        Args:
            layout: How ranks share the run.
            index: Along dp_shard x cp; of the ranks that hold the same experts, every ep-th is one.
        """
        if not self.is_expert:
            return _rows(self.shape[0], shards=layout.fsdp, index=index) * math.prod(self.shape[1:])
        shards, index = layout.expert_fsdp, index // layout.ep
        if self.shape[0] < shards and self.shape[1] % shards == 0:
            return self.numel // shards
        return _rows(self.shape[0], shards=shards, index=index) * math.prod(self.shape[1:])


def _rows(count: int, *, shards: int, index: int) -> int:
    rows = -(-count // shards)
    return max(0, min(rows, count - index * rows))


class Alike(NamedTuple):
    """What makes parameters travel alike."""

    is_expert: bool
    is_fp32: bool
    as_codes: bool


@dataclass(kw_only=True)
class Parameters:
    """Lists the parameters of blocks and of the ends, and remembers them.

    Args:
        model: The whole model.
        recipe: Its recipe.
    """

    model: ModelConfig
    recipe: RecipeConfig
    _known: dict[tuple[object, ...], list[Parameter]] = field(default_factory=dict)
    _alike: dict[tuple[object, ...], Counter[Alike]] = field(default_factory=dict)

    def block(self, key: BlockKey, layout: Layout) -> list[Parameter]:
        """Return the parameters of one block."""
        what = ("block", key, layout.tp, layout.ep)
        if what not in self._known:
            built = local_block(key, self.model, self.recipe, layout=layout).model
            self._known[what] = [*_parameters(built.blocks, layout, prefix="blocks.")]
        return self._known[what]

    def block_elements(self, key: BlockKey, layout: Layout) -> Counter[Alike]:
        """Return the elements of one block by how they travel."""
        what = (key, layout.tp, layout.ep, layout.fsdp, layout.gathers_codes)
        if what not in self._alike:
            self._alike[what] = elements_alike(self.block(key, layout), layout)
        return self._alike[what]

    def ends(self, layout: Layout) -> dict[str, list[Parameter]]:
        """Return the parameters of ``embedding``, ``final_norm``, ``lm_head`` and ``mtp``; no entry for what is not."""
        what = ("ends", layout.tp, layout.ep)
        if what not in self._known:
            built = local_ends(self.model, self.recipe, layout=layout).model
            self._known[what] = [*_parameters(built, layout, prefix="")]
        parts: dict[str, list[Parameter]] = {}
        for parameter in self._known[what]:
            part = parameter.name.split(".")[0]
            if part != "blocks":
                parts.setdefault(part, []).append(parameter)
        return parts


def _parameters(module: nn.Module, layout: Layout, *, prefix: str) -> Iterator[Parameter]:
    for owner, child in module.named_modules():
        for name, parameter in child.named_parameters(recurse=False):
            is_expert = isinstance(child, GroupedLinear)
            shape = tuple(parameter.shape)
            yield Parameter(
                name=prefix + (f"{owner}.{name}" if owner else name),
                shape=(shape[0] // layout.ep, *shape[1:]) if is_expert else shape,
                is_expert=is_expert,
                is_fp32=getattr(child, "keep_fp32", False) or isinstance(child, nn.Embedding),
                precision=getattr(child, "precision", None) if name == "weight" else None,
            )


def elements_alike(part: list[Parameter], layout: Layout) -> Counter[Alike]:
    """Sum up the elements of parameters by how they travel.

    Weights of quantized Linears go as codes where that is asked for and shards end between tiles.
    """
    found: Counter[Alike] = Counter()
    for parameter in part:
        shards = layout.expert_fsdp if parameter.is_expert else layout.fsdp
        fits = parameter.precision is not None and parameter.shape[0] % (16 * shards) == 0
        as_codes = layout.gathers_codes and fits and not parameter.is_expert
        found[Alike(parameter.is_expert, parameter.is_fp32, as_codes)] += parameter.numel
    return found


def num_parameters(parts: list[Parameter]) -> int:
    """Return the number of elements on the tp and ep rank."""
    return sum(parameter.numel for parameter in parts)


def reads_embedding_twice(ends: dict[str, list[Parameter]]) -> bool:
    """Whether the end of a model needs the embedding again: as the head, or for multi-token prediction."""
    return HEAD not in ends or MTP in ends


def held_ends(ends: dict[str, list[Parameter]], *, is_first: bool, is_last: bool) -> dict[str, list[Parameter]]:
    """Return those of the parts outside blocks that a rank has, which has the first stage, the last, both or none."""
    has_embedding = is_first or (is_last and reads_embedding_twice(ends))
    return {name: part for name, part in ends.items() if (has_embedding if name == EMBEDDING else is_last)}
