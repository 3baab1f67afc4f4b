"""Sharding of parameters, gradients and optimizer state over the data ranks (FSDP2), and the dtype policy.

In BF16 every block is two groups, each gathered on its own: the Linears in BF16, and the small modules that must see
FP32 parameters (`keep_fp32`). In FP32 it is one. The output head belongs to the root, which stays gathered. The
embedding is FP32 as well, because its gradient is a sum over all occurrences of a token, which a BF16 weight would
make a BF16 sum. Gradients are added up in FP32 and not averaged: the loss is divided by the number of labels of all
ranks already.
"""

from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from nvfp4_train.model.hybrid import HybridLM


def apply_fsdp(model: HybridLM, *, mesh: DeviceMesh, compute_dtype: torch.dtype, reshard_after_forward: bool) -> None:
    """Shard `model` in place; at degree 1 too, so that one rank computes in the dtypes of many.

    Args:
        model: Whole or a part, on any device, meta included; its FP32 parameters become DTensors over `mesh`.
        mesh: One axis to shard over, or two: replicate, shard.
        compute_dtype: Dtype in which Linears see their weights.
        reshard_after_forward: Whether the gathered weights of a block are freed between its forward and its backward.
    """
    in_fp32 = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    in_compute_dtype = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block in (*model.blocks.children(), *model.mtp.children()):
        if compute_dtype is not torch.float32:
            # A few kilobytes: not worth a second gathering in backward.
            fully_shard(_fp32_modules(block), mesh=mesh, mp_policy=in_fp32, reshard_after_forward=False)
        fully_shard(block, mesh=mesh, mp_policy=in_compute_dtype, reshard_after_forward=reshard_after_forward)
    root_policy = in_fp32
    if not model.cfg.tie_embeddings:  # a tied one is used at both ends: it stays in the root's group
        root_policy = in_compute_dtype
        if model.final_norm is not None:
            fully_shard(model.final_norm, mesh=mesh, mp_policy=in_fp32, reshard_after_forward=False)
        if model.embedding is not None:
            fully_shard(model.embedding, mesh=mesh, mp_policy=in_fp32, reshard_after_forward=True)
            # Its gradient does not depend on its values.
            cast(FSDPModule, model.embedding).set_unshard_in_backward(False)
    fully_shard(model, mesh=mesh, mp_policy=root_policy, reshard_after_forward=False)
    for module in fsdp_modules(model):
        # The factor alone becomes a PREMUL_SUM reduction, which gloo lacks.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """Return the modules of `model` that are the root of an FSDP group."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def prepare_backward(model: nn.Module, *, is_last: bool, keeps_gathered: bool) -> None:
    """Say what the next backward of a sharded `model` does besides adding up gradients.

    Args:
        model: From `apply_fsdp`.
        is_last: Whether ranks exchange gradients: once per step. Until then each rank adds up its own, in FP32.
        keeps_gathered: Whether the next microbatch uses the weights that are gathered now.
    """
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(is_last)
    model.set_is_last_backward(is_last)
    model.set_reshard_after_backward(is_last or not keeps_gathered)


def reduce_gradients(model: nn.Module) -> None:
    """Let ranks exchange the gradients that a sharded `model` has added up, after backwards that did not.

    A backward that is the last one does so itself. In a pipeline none is: gradients of weights may come later.
    """
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(True)
    model.set_is_last_backward(True)
    model.set_reshard_after_backward(True)
    # What autograd calls at the end of a backward; PyTorch's own pipeline stages call it in the same way (2.13,
    # torch/distributed/pipelining/stage.py, perform_reduce_grad).
    fully_shard.state(model)._root_post_backward_final_callback()  # type: ignore[attr-defined]


def reshard(model: nn.Module) -> None:
    """Free all gathered weights, so that the next forward gathers the present ones."""
    for module in fsdp_modules(model):
        module.reshard()


def _fp32_modules(block: nn.Module) -> list[nn.Module]:
    return [module for module in block.modules() if getattr(module, "keep_fp32", False)]
