"""What a layout asks of the model: that every rank gets an equal share, and that no block of a recipe is cut."""

from collections.abc import Callable
from dataclasses import dataclass

from nvfp4_train.config.batch import BatchConfig
from nvfp4_train.config.model import ModelConfig
from nvfp4_train.config.parallel import ParallelConfig, ReduceDtype
from nvfp4_train.config.pattern import DEPTH, LayerKind, known_kinds, known_mtp_kinds
from nvfp4_train.config.problem import Problem
from nvfp4_train.config.recipe import ComputeDtype, RecipeConfig


@dataclass(frozen=True)
class Share:
    """Something of which the ranks of tp hold equal shares.

    Args:
        key: Dotted key below the root.
        value: How much there is.
        kind: The block that has it; None: every model has.
    """

    key: str
    value: Callable[[ModelConfig], int]
    kind: LayerKind | None


SHARES = (
    Share("model.attention.num_kv_heads", lambda model: model.attention.num_kv_heads, LayerKind.attention),
    Share("model.mamba.num_groups", lambda model: model.mamba.num_groups, LayerKind.mamba),
    Share("model.mlp.d_ff", lambda model: model.mlp.d_ff, LayerKind.mlp),
    Share("model.moe.d_ff", lambda model: model.moe.d_ff, LayerKind.moe),
    Share("model.moe.shared_d_ff", lambda model: model.moe.shared_d_ff, LayerKind.moe),
    Share("model.moe.d_latent", lambda model: model.moe.d_latent, LayerKind.moe),
    Share("model.vocab_size", lambda model: model.vocab_size, None),
)


def share_problems(
    model: ModelConfig, parallel: ParallelConfig, *, batch: BatchConfig, recipe: RecipeConfig
) -> list[Problem]:
    """Return what the ranks of tp could not divide among them, or not compute together."""
    degree = parallel.tp_degree
    if degree <= 1:  # below 1 it is wrong by itself
        return []
    kinds = set(known_kinds(model.pattern).values()) | set(known_mtp_kinds(model.pattern).values())
    problems = [
        _not_divisible(share.key, share.value(model), degree)
        for share in SHARES
        if (share.kind is None or share.kind in kinds) and share.value(model) % degree
    ]
    if DEPTH in model.pattern and 2 * model.d_model % degree:
        problems.append(_not_divisible("model.d_model", model.d_model, degree))
    return [*problems, *_sequence_problems(parallel, batch), *_dtype_problems(parallel, recipe)]


def _not_divisible(key: str, value: int, degree: int) -> Problem:
    return Problem(
        key=key,
        value=value,
        rule=f"must be a multiple of parallel.tp_degree ({degree}), whose ranks share it equally",
        fix="lower parallel.tp_degree, or change it",
    )


def _sequence_problems(parallel: ParallelConfig, batch: BatchConfig) -> list[Problem]:
    parts = parallel.cp_degree * parallel.tp_degree
    if not parallel.sequence_parallel or parts < 1 or batch.sequence_length % parts == 0:
        return []
    return [
        Problem(
            key="batch.sequence_length",
            value=batch.sequence_length,
            rule=f"sequence parallelism divides it among cp_degree x tp_degree = {parts} ranks",
            fix="change it or a degree, or use parallel.sequence_parallel=false",
        )
    ]


def _dtype_problems(parallel: ParallelConfig, recipe: RecipeConfig) -> list[Problem]:
    if recipe.compute_dtype is not ComputeDtype.fp32 or parallel.tp_reduce_dtype is ReduceDtype.fp32:
        return []
    return [
        Problem(
            key="parallel.tp_reduce_dtype",
            value=parallel.tp_reduce_dtype.value,
            rule=f"recipe {recipe.name} computes in FP32, which sums in BF16 would undo",
            fix="use parallel.tp_reduce_dtype=fp32",
        )
    ]
