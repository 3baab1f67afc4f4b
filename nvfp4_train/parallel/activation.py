"""Activation checkpointing: recompute in backward what forward does not keep."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from nvfp4_train.config.parallel import ActivationCheckpoint
from nvfp4_train.model.hybrid import HybridLM
from nvfp4_train.precision.monitor import position_of
from nvfp4_train.precision.position import RoundingPosition

# Matrix products, attention and the scan included: most of the work, and results about as large as their inputs.
KEPT_OPERATIONS = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::_grouped_mm",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "nvfp4_train::gemm",
        "nvfp4_train::gemm_bf16",
        "nvfp4_train::gemm_fp32",
        "nvfp4_train::scan_forward",
    }
)


# FSDP's hooks inside a block name their spans for the profiler, in backward more often than in forward.
SAC_IGNORED_OPS.update(
    {torch.ops.profiler._record_function_enter_new.default, torch.ops.profiler._record_function_exit._RecordFunction}
)


def checkpoint_activations(model: HybridLM, mode: ActivationCheckpoint) -> None:
    """Make every residual block of `model` keep less between forward and backward, in place.

    Results are bitwise the same: what is recomputed is computed by the same operations from the same inputs, at the
    same position. In a pipeline that has moved on to other microbatches in between.

    Args:
        model: Before it is sharded; names of parameters do not change.
        mode: What to keep.
    """
    if mode is ActivationCheckpoint.none:
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if mode is ActivationCheckpoint.selective:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_products)
    position = position_of(model)
    for block in model.all_blocks():
        block.forward = _Checkpointed(block.forward, position, options)  # type: ignore[method-assign, assignment]


class _Checkpointed:
    """A forward that is computed again in backward, at the position of its first time."""

    def __init__(self, forward: Callable[..., Any], position: RoundingPosition | None, options: dict[str, Any]) -> None:
        self._forward = forward
        self._position = position
        self._options = options

    def __call__(self, *inputs: Any) -> Any:
        if self._position is None:
            return checkpoint(self._forward, *inputs, **self._options)
        return checkpoint(self._run_at, self._position, self._position.snapshot(), *inputs, **self._options)

    def _run_at(self, position: RoundingPosition, snapshot: dict[str, int | bool], *inputs: Any) -> Any:
        present = position.snapshot()
        position.restore(snapshot)
        try:
            return self._forward(*inputs)
        finally:
            position.restore(present)


def _keep_products(ctx: Any, operation: OpOverload, *args: Any, **kwargs: Any) -> CheckpointPolicy:  # noqa: ARG001
    name = operation.name().partition(".")[0]
    return CheckpointPolicy.MUST_SAVE if name in KEPT_OPERATIONS else CheckpointPolicy.PREFER_RECOMPUTE
