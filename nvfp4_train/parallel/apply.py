"""The parallel pass: it spreads a model over the mesh, without knowing what its Linears compute."""

import torch

from nvfp4_train.config.engine import TorchEngineConfig
from nvfp4_train.config.parallel import Compile, ParallelConfig
from nvfp4_train.model.hybrid import HybridLM
from nvfp4_train.parallel.activation import checkpoint_activations
from nvfp4_train.parallel.compile import compile_blocks
from nvfp4_train.parallel.fsdp import apply_fsdp
from nvfp4_train.parallel.mesh import Mesh


def parallelize(
    model: HybridLM,
    *,
    mesh: Mesh,
    parallel_cfg: ParallelConfig,
    engine_cfg: TorchEngineConfig,
    compute_dtype: torch.dtype,
) -> None:
    """Change `model` in place, after the precision pass and before it is materialized.

    Args:
        model: On the meta device, whole or one stage of a pipeline; parameters become DTensors.
        mesh: Of all ranks.
        parallel_cfg: What a rank recomputes and compiles.
        engine_cfg: How the engine trades memory for communication.
        compute_dtype: Dtype of activations, and of the weights that Linears see.
    """
    if parallel_cfg.compile is Compile.block:
        compile_blocks(model)
    checkpoint_activations(model, parallel_cfg.activation_checkpoint)
    apply_fsdp(
        model,
        mesh=mesh.fsdp_mesh,
        compute_dtype=compute_dtype,
        reshard_after_forward=engine_cfg.reshard_after_forward,
    )
