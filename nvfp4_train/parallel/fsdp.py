"""Sharding of parameters, gradients and optimizer state over the data ranks (FSDP2), and the dtype policy.

In BF16 every block is two groups, each gathered on its own: the Linears in BF16, and the small modules that must see
FP32 parameters (`keep_fp32`). In FP32 it is one. Routed experts are a group of their own, because their ranks are
arranged differently; it is sharded along the experts, or along their output features where experts are too few. The
output head belongs to the root, which stays gathered. The
embedding is FP32 as well, because its gradient is a sum over all occurrences of a token, which a BF16 weight would
make a BF16 sum. Gradients are added up in FP32 and not averaged: the loss is divided by the number of labels of all
ranks already.
"""

from functools import partial
from typing import cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from nvfp4_train.config.problem import Problem, require
from nvfp4_train.model.hybrid import HybridLM
from nvfp4_train.model.moe import Experts
from nvfp4_train.parallel.mesh import Mesh


def apply_fsdp(model: HybridLM, *, mesh: Mesh, compute_dtype: torch.dtype, reshard_after_forward: bool | int) -> None:
    """Shard `model` in place; at degree 1 too, so that one rank computes in the dtypes of many.

    Args:
        model: Whole or a part, on any device, meta included; its FP32 parameters become DTensors over `mesh`. Those
            that are DTensors already, over other axes, are sharded further.
        mesh: Its `fsdp_mesh` and `expert_fsdp_mesh` are one axis to shard over, or two: replicate, shard.
        compute_dtype: Dtype in which Linears see their weights.
        reshard_after_forward: Whether the gathered weights of a block are freed between its forward and its backward; a
            number: until then they stay spread over so many neighbouring ranks. Experts are freed wholly where that
            number does not divide their ranks.

    Raises:
        ConfigError: for a number of ranks that does not divide those of the shard.
    """
    dense, num_shards = mesh.fsdp_mesh, mesh.dense["fsdp"].size()
    if not isinstance(reshard_after_forward, bool) and num_shards % reshard_after_forward:
        rule = f"must divide the {num_shards} ranks that share a weight (dp_shard_degree x cp_degree)"
        fix = "change it, or use 0 for all of them"
        require([Problem(key="engine.reshard_ranks", value=reshard_after_forward, rule=rule, fix=fix)])
    in_fp32 = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    in_compute_dtype = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block in (*model.blocks.children(), *model.mtp.children()):
        for experts in (module for module in block.modules() if isinstance(module, Experts)):
            fully_shard(
                experts,
                mesh=mesh.expert_fsdp_mesh,
                mp_policy=in_compute_dtype,
                reshard_after_forward=_reshard_experts(reshard_after_forward, num_shards=mesh.expert["efsdp"].size()),
                shard_placement_fn=partial(_place_experts, num_shards=mesh.expert["efsdp"].size()),
            )
        if compute_dtype is not torch.float32:
            # A few kilobytes: not worth a second gathering in backward.
            fully_shard(_fp32_modules(block), mesh=dense, mp_policy=in_fp32, reshard_after_forward=False)
        fully_shard(block, mesh=dense, mp_policy=in_compute_dtype, reshard_after_forward=reshard_after_forward)
    root_policy = in_fp32
    if not model.cfg.tie_embeddings:  # a tied one is used at both ends: it stays in the root's group
        root_policy = in_compute_dtype
        if model.final_norm is not None:
            fully_shard(model.final_norm, mesh=dense, mp_policy=in_fp32, reshard_after_forward=False)
        if model.embedding is not None:
            fully_shard(model.embedding, mesh=dense, mp_policy=in_fp32, reshard_after_forward=True)
            # Its gradient does not depend on its values.
            cast(FSDPModule, model.embedding).set_unshard_in_backward(False)
    fully_shard(model, mesh=dense, mp_policy=root_policy, reshard_after_forward=False)
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
    # The small ones, which forwards leave gathered, stay so: else a forward that came after another one would gather
    # nothing, and recomputing it after the backward of the other one would, which selective checkpointing refuses.
    for module in fsdp_modules(model):
        if getattr(module, "keep_fp32", False):
            module.set_reshard_after_backward(is_last, recurse=False)


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


def parameters_in_compute_dtype(model: HybridLM) -> list[nn.Parameter]:
    """Return the parameters of a whole model that `apply_fsdp` gathers in the compute dtype: Linears' and experts'."""
    in_fp32 = [module for module in model.modules() if isinstance(module, nn.Embedding)] + _fp32_modules(model)
    seen_in_fp32 = {id(parameter) for module in in_fp32 for parameter in module.parameters()}
    return [parameter for parameter in model.parameters() if id(parameter) not in seen_in_fp32]


def _reshard_experts(size: bool | int, *, num_shards: int) -> bool | int:  # noqa: FBT001 - what FSDP takes
    is_part = isinstance(size, bool) or num_shards % size == 0
    return size if is_part else True


def _place_experts(parameter: nn.Parameter, *, num_shards: int) -> Shard:
    """Say along which dim [E, out_features, in_features] is sharded; one that is not the first needs equal parts."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    num_experts, out_features, _ = local.shape
    return Shard(1) if num_experts < num_shards and out_features % num_shards == 0 else Shard(0)


def _fp32_modules(root: nn.Module) -> list[nn.Module]:
    return [module for module in root.modules() if getattr(module, "keep_fp32", False)]
