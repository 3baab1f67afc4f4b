"""Small models for tests."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nvfp4_train.config.model import (
    AttentionConfig,
    MambaConfig,
    MlpConfig,
    ModelConfig,
    MtpConfig,
    NormGroup,
    Position,
)
from nvfp4_train.config.moe import Activation, MoeConfig, RouterScore
from nvfp4_train.model.hybrid import HybridLM, build_model
from nvfp4_train.model.init import init_parameters

TINY_MAMBA = MambaConfig(
    num_heads=4,
    d_head=16,
    d_state=16,
    num_groups=2,
    d_conv=4,
    chunk_size=8,
    conv_bias=True,
    proj_bias=False,
    norm_group=NormGroup.group,
    dt_init_min=1e-3,
    dt_init_max=0.1,
    dt_init_floor=1e-4,
    dt_min=0.0,
    dt_max=float("inf"),
)
TINY_ATTENTION = AttentionConfig(
    num_heads=4,
    num_kv_heads=2,
    d_head=16,
    position=Position.none,
    rope_theta=10000.0,
    qk_norm=False,
    window_tokens=0,
    qkv_bias=False,
    output_bias=False,
)
TINY_MLP = MlpConfig(d_ff=64, activation=Activation.squared_relu, bias=False)
TINY_MOE = MoeConfig(
    num_experts=8,
    top_k=2,
    d_ff=32,
    shared_d_ff=48,
    d_latent=0,
    activation=Activation.squared_relu,
    score=RouterScore.sigmoid,
    num_groups=1,
    top_groups=1,
    normalize_weights=True,
    routed_scaling=2.5,
    bias_update_rate=1e-3,
    auxiliary_loss_weight=0.0,
    z_loss_weight=0.0,
)
TINY_MTP = MtpConfig(loss_weight=0.3, share_depths=False)
TINY_MODEL = ModelConfig(
    pattern="M-*-M",
    d_model=32,
    vocab_size=64,
    norm_eps=1e-5,
    tie_embeddings=False,
    init_std=0.02,
    rescale_prenorm_residual=True,
    residual_fp32=False,
    mamba=TINY_MAMBA,
    attention=TINY_ATTENTION,
    mlp=TINY_MLP,
    moe=TINY_MOE,
    mtp=TINY_MTP,
)


def tiny_model(**changes: Any) -> ModelConfig:
    """Return the tiny hybrid with some fields of ``ModelConfig`` changed."""
    return replace(TINY_MODEL, **changes)


def initialized(cfg: ModelConfig, *, seed: int = 0) -> HybridLM:
    """Build a model and give it its published initialization."""
    model = build_model(cfg)
    init_parameters(model, cfg, seed=seed)
    return model


def document_ids(*lengths: int, rows: int = 1) -> Tensor:
    """Return [rows, sum(lengths)] int32: documents of these lengths in each row."""
    ids = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(torch.tensor(lengths))
    return ids.expand(rows, -1).contiguous()
