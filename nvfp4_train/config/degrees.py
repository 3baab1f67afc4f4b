"""What the degrees of context and expert parallelism ask of the model, the batch and the recipe."""

from typing import TYPE_CHECKING

from nvfp4_train.config.model import ModelConfig
from nvfp4_train.config.pattern import LayerKind, known_kinds, known_mtp_kinds
from nvfp4_train.config.problem import Rule
from nvfp4_train.config.recipe import RecipeConfig
from nvfp4_train.numerics.spec import CHUNK, DIM_MULTIPLE, GlobalScale

if TYPE_CHECKING:
    from nvfp4_train.config.train import TrainConfig


def degree_rules(cfg: "TrainConfig") -> list[Rule]:
    """Return the rules, for `violations`."""
    parallel, batch, model = cfg.parallel, cfg.batch, cfg.model
    return [
        Rule(
            "parallel.cp_degree",
            lambda: (
                parallel.cp_degree <= 1
                or batch.sequence_length % (parallel.cp_degree * tokens_of_a_block(cfg.recipe)) == 0
            ),
            lambda: (
                f"each rank of cp gets a part of every row of batch.sequence_length ({batch.sequence_length}) tokens, "
                f"which must be whole blocks of {tokens_of_a_block(cfg.recipe)} tokens"
            ),
            "change batch.sequence_length or parallel.cp_degree",
        ),
        Rule(
            "parallel.ep_degree",
            lambda: parallel.ep_degree <= 1 or _has_experts(model),
            "there are no experts to spread: model.pattern has no block E",
            "use parallel.ep_degree=1",
        ),
        Rule(
            "parallel.ep_degree",
            lambda: (
                parallel.ep_degree <= 1 or not _has_experts(model) or model.moe.num_experts % parallel.ep_degree == 0
            ),
            lambda: f"must divide model.moe.num_experts ({model.moe.num_experts})",
            "change one of the two",
        ),
    ]


def tokens_of_a_block(recipe: RecipeConfig) -> int:
    """Return the tokens that a quantization works on together at most, and at least those of one block of any format.

    A rank that held a part of such a block would round it otherwise than a rank with the whole row.
    """
    specs = recipe.linear.operands.values()
    together = max(size for spec in specs for size in (spec.hadamard_size, spec.block_size))
    chunk = CHUNK if any(spec.fp32_scale is GlobalScale.block_128 for spec in specs) else 0
    return max(DIM_MULTIPLE, together, chunk)


def _has_experts(model: ModelConfig) -> bool:
    kinds = [*known_kinds(model.pattern).values(), *known_mtp_kinds(model.pattern).values()]
    return LayerKind.moe in kinds
