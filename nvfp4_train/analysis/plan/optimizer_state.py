"""Bytes of optimizer state, found by building the optimizer over a tiny model with the same names."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nvfp4_train.analysis.plan.parameters import Parameter
from nvfp4_train.config.model import ModelConfig
from nvfp4_train.config.optimizer import MomentsConfig, OptimizerConfig, StateDtype, StateOffload
from nvfp4_train.config.pattern import LayerKind
from nvfp4_train.model.hybrid import build_model
from nvfp4_train.optim.build import build_optimizer


@dataclass(frozen=True, kw_only=True)
class StateSize:
    """State of one parameter: bytes of each of its elements, and bytes that it has once."""

    per_element: float
    constant: int


@dataclass(frozen=True, kw_only=True)
class OptimizerState:
    """Bytes of state per parameter.

    Args:
        blocks: By kind of block and name below ``blocks.0``.
        ends: By name of a parameter outside blocks.
        on_host: Whether it lives in the host's memory.
        is_converted: Whether updates work on copies in FP32.
    """

    blocks: dict[tuple[LayerKind, str], StateSize]
    ends: dict[str, StateSize]
    on_host: bool
    is_converted: bool

    def of(self, parameter: Parameter, *, kind: LayerKind | None, elements: int) -> int:
        """Return the bytes for so many elements of a parameter; ``kind`` is that of its block, None outside blocks."""
        size = self.ends[parameter.name] if kind is None else self.blocks[kind, parameter.name]
        return round(size.per_element * elements) + size.constant


def measure_state(model: ModelConfig, cfg: OptimizerConfig) -> OptimizerState:
    """Build the optimizer over one block of each kind, of the least possible widths, and weigh its state."""
    pattern = model.layer_pattern
    kinds = list(dict.fromkeys([*model.layer_kinds, *pattern.mtp, LayerKind.mlp]))
    tail = f"/{''.join(pattern.mtp)}" * pattern.num_mtp_depths
    tiny = build_model(replace(_tiny(model), pattern="".join(kind.value for kind in kinds) + tail))
    with torch.no_grad():
        for parameter in tiny.parameters():
            parameter.zero_()
    optimizer = build_optimizer(tiny, cfg)
    blocks, ends = {}, {}
    for name, parameter in tiny.named_parameters():
        size = _weigh(optimizer.state[parameter], elements=parameter.numel())
        if name.startswith("blocks."):
            index, rest = name.removeprefix("blocks.").split(".", 1)
            blocks[kinds[int(index)], f"blocks.0.{rest}"] = size
        else:
            ends[name] = size
    assert isinstance(cfg, MomentsConfig)
    on_host = cfg.state_offload is StateOffload.cpu
    is_converted = on_host or cfg.state_dtype is not StateDtype.fp32
    return OptimizerState(blocks=blocks, ends=ends, on_host=on_host, is_converted=is_converted)


def _weigh(state: dict[str, object], *, elements: int) -> StateSize:
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    whole = sum(tensor.nbytes for tensor in tensors if tensor.ndim)
    return StateSize(per_element=whole / elements, constant=sum(tensor.nbytes for tensor in tensors if not tensor.ndim))


def _tiny(model: ModelConfig) -> ModelConfig:
    attention = model.attention
    return replace(
        model,
        d_model=16,
        vocab_size=32,
        mamba=replace(model.mamba, num_heads=2, num_groups=1, d_head=8, d_state=8),
        attention=replace(attention, num_heads=2, num_kv_heads=1, d_head=8),
        mlp=replace(model.mlp, d_ff=32),
        moe=replace(
            model.moe,
            num_experts=2,
            top_k=1,
            num_groups=1,
            top_groups=1,
            d_ff=16,
            shared_d_ff=min(model.moe.shared_d_ff, 16),
            d_latent=min(model.moe.d_latent, 16),
        ),
    )
