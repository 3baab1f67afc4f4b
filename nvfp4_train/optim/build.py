"""Optimizers over the FP32 masters."""

import torch
from torch import nn
from torch.optim import Optimizer

from nvfp4_train.config.optimizer import AdamWConfig, OptimizerConfig
from nvfp4_train.optim.groups import split_by_decay


def build_optimizer(model: nn.Module, cfg: OptimizerConfig) -> Optimizer:
    """Build the optimizer of a materialized model.

    Its state exists from the start, so that a checkpoint of step 0 has the layout of every other one. It takes part
    in skipping an update on the device: with a 0-dim FP32 tensor `found_inf` as attribute, `step` does nothing where
    that tensor is 1.

    Args:
        model: Parameters are FP32 tensors or DTensors, on their final device.
        cfg: One of the leaf classes of the `optimizer` group.
    """
    optimizer = build_stateless(model, cfg)
    match optimizer:
        case torch.optim.AdamW():
            _allocate_adamw_state(optimizer)
    return optimizer


def build_stateless(model: nn.Module, cfg: OptimizerConfig) -> Optimizer:
    """Build the optimizer without its state, for an engine that puts shards in the place of the parameters."""
    groups = split_by_decay(model)
    parameter_groups = [
        {"params": list(groups.decayed.values()), "decays": True},
        {"params": list(groups.not_decayed.values()), "decays": False},
    ]
    match cfg:
        case AdamWConfig():
            # Learning rate and weight decay come with each step. Fused: one pass over memory, and the only variant that
            # reads `found_inf`.
            return torch.optim.AdamW(parameter_groups, lr=0.0, betas=(cfg.beta1, cfg.beta2), eps=cfg.eps, fused=True)
    raise AssertionError(f"no optimizer for {type(cfg).__name__}")


def _allocate_adamw_state(optimizer: torch.optim.AdamW) -> None:
    """Create the state that AdamW would create in its first step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
