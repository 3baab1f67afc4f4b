"""The parallel pass: it spreads a model over the mesh, without knowing what its Linears compute."""

from typing import cast

import torch

from nvfp4_train.config.engine import TorchEngineConfig
from nvfp4_train.config.parallel import Compile, ParallelConfig
from nvfp4_train.model.hybrid import HybridLM
from nvfp4_train.model.mtp import MtpDepth
from nvfp4_train.parallel.activation import checkpoint_activations
from nvfp4_train.parallel.compile import compile_blocks
from nvfp4_train.parallel.context import apply_context
from nvfp4_train.parallel.expert import apply_expert
from nvfp4_train.parallel.fsdp import apply_fsdp
from nvfp4_train.parallel.mesh import Mesh
from nvfp4_train.parallel.tensor import TensorParallel, keep_norm, split_block, split_mtp
from nvfp4_train.parallel.vocabulary import split_vocabulary


def parallelize(
    model: HybridLM,
    *,
    mesh: Mesh,
    parallel_cfg: ParallelConfig,
    engine_cfg: TorchEngineConfig,
    compute_dtype: torch.dtype,
) -> None:
    """Change `model` in place, after the precision pass and before it is materialized.

    In this order: its layers are spread over ranks, its blocks are compiled, they recompute, and what is left of every
    parameter is sharded.

    Args:
        model: On the meta device, whole or one stage of a pipeline; parameters become DTensors.
        mesh: Of all ranks.
        parallel_cfg: How the ranks of tp share a layer, and what a rank recomputes and compiles.
        engine_cfg: How the engine trades memory for communication.
        compute_dtype: Dtype of activations, and of the weights that Linears see.
    """
    if mesh.degree("tp") > 1:
        split_layers(model, TensorParallel.of(parallel_cfg, mesh, compute_dtype=compute_dtype))
    apply_expert(model, mesh=mesh)
    apply_context(model, mesh=mesh)
    if parallel_cfg.compile is Compile.block:
        compile_blocks(model)
    checkpoint_activations(model, parallel_cfg.activation_checkpoint)
    apply_fsdp(
        model,
        mesh=mesh,
        compute_dtype=compute_dtype,
        reshard_after_forward=engine_cfg.reshard_ranks or engine_cfg.reshard_after_forward,
    )


def split_layers(model: HybridLM, tp: TensorParallel) -> None:
    """Spread every layer of `model` over the ranks of `tp`, in place; its quantized modules are those of the pass."""
    for block in model.all_blocks():
        split_block(block, tp)
    for depth in model.mtp.children():
        split_mtp(cast(MtpDepth, depth), tp)
    if model.final_norm is not None:  # the end of a pipeline has it
        keep_norm(model.final_norm, tp)
    split_vocabulary(model, tp)
