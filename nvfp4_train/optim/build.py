"""Optimizers over the FP32 masters."""

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nvfp4_train.config.optimizer import (
    AdamWConfig,
    MomentsConfig,
    MuonConfig,
    OptimizerConfig,
    StateDtype,
    StateOffload,
)
from nvfp4_train.optim.adamw import AdamW, StateStorage
from nvfp4_train.optim.fused_rows import fused_rows
from nvfp4_train.optim.groups import split_by_decay, split_by_shape
from nvfp4_train.optim.muon import Muon, MuonRule
from nvfp4_train.optim.sharding import Sharding

TORCH_DTYPE = {StateDtype.fp32: torch.float32, StateDtype.bf16: torch.bfloat16}


def build_optimizer(model: nn.Module, cfg: OptimizerConfig, *, sharding: Sharding | None = None) -> Optimizer:
    """Build the optimizer of a materialized model.

    Its state exists from the start, so that a checkpoint of step 0 has the layout of every other one. It takes part
    in skipping an update on the device: with a 0-dim FP32 tensor `found_inf` as attribute, `step` does nothing where
    that tensor is 1.

    Args:
        model: Parameters are FP32 tensors or DTensors, on their final device.
        cfg: One of the leaf classes of the `optimizer` group. Learning rate and weight decay come with each step.
        sharding: How to reach the parts of sharded parameters; None for a model that this process holds whole.
    """
    match cfg:
        case AdamWConfig():
            return AdamW(_decay_groups(model), **_options(cfg, sharding))
        case MuonConfig():
            rule = MuonRule(
                momentum=cfg.momentum,
                steps=cfg.newton_schulz_steps,
                dtype=TORCH_DTYPE[cfg.orthogonalize_dtype],
                scale=cfg.update_scale,
            )
            parameters = dict(model.named_parameters())
            rows = {parameters[name]: rows for name, rows in fused_rows(model).items() if name in parameters}
            return Muon(_muon_groups(model), rule=rule, rows=rows, **_options(cfg, sharding))
    raise AssertionError(f"no optimizer for {type(cfg).__name__}")


def _options(cfg: MomentsConfig, sharding: Sharding | None) -> dict[str, Any]:
    storage = StateStorage(dtype=TORCH_DTYPE[cfg.state_dtype], on_host=cfg.state_offload is StateOffload.cpu)
    return {
        "betas": (cfg.beta1, cfg.beta2),
        "eps": cfg.eps,
        "storage": storage,
        "sharding": sharding or Sharding(),
    }


def _decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    groups = split_by_decay(model)
    return [
        {"params": list(groups.decayed.values()), "decays": True},
        {"params": list(groups.not_decayed.values()), "decays": False},
    ]


def _muon_groups(model: nn.Module) -> list[dict[str, Any]]:
    groups = split_by_shape(model)
    matrices = {id(parameter) for parameter in groups.matrices.values()}
    others = [
        {
            **group,
            "params": [parameter for parameter in group["params"] if id(parameter) not in matrices],
            "is_orthogonalized": False,
        }
        for group in _decay_groups(model)
    ]
    return [
        {"params": list(groups.matrices.values()), "decays": True, "is_orthogonalized": True},
        *(group for group in others if group["params"]),
    ]
