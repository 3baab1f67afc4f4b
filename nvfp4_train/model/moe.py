"""Mixture of experts without dropped tokens."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nvfp4_train.config.moe import Activation, MoeConfig
from nvfp4_train.model.documents import Documents
from nvfp4_train.model.linear import GroupedLinear, Linear
from nvfp4_train.model.mlp import Mlp, activate
from nvfp4_train.model.router import Router, Routing


class Penalized(NamedTuple):
    """What a mixer with auxiliary losses returns.

    Args:
        value: [B, S, D].
        penalty: FP32 scalar, to be minimized per token.
    """

    value: Tensor
    penalty: Tensor


class Moe(nn.Module):
    """Routed experts, in a latent width if there is one, plus shared experts that see every token."""

    def __init__(self, cfg: MoeConfig, *, d_model: int) -> None:
        super().__init__()
        width = cfg.d_latent or d_model
        self.router = Router(cfg, d_model=d_model)
        self.fc1_latent_proj = Linear(d_model, width) if cfg.d_latent else None
        self.experts = Experts(cfg, width=width)
        self.fc2_latent_proj = Linear(width, d_model) if cfg.d_latent else None
        self.shared_experts = (
            Mlp(d_model, d_ff=cfg.shared_d_ff, activation=cfg.activation, bias=False) if cfg.shared_d_ff else None
        )

    def forward(self, h: Tensor, documents: Documents) -> Tensor | Penalized:
        """Map [B, S, D] to [B, S, D], with the penalty of a router that has one."""
        tokens = h.flatten(0, -2)
        routing = self.router(tokens)
        routed = tokens if self.fc1_latent_proj is None else self.fc1_latent_proj(tokens)
        routed = self.experts(routed, routing)
        if self.fc2_latent_proj is not None:
            routed = self.fc2_latent_proj(routed)
        out = routed.view_as(h)
        if self.shared_experts is not None:
            out = out + self.shared_experts(h, documents)
        return out if routing.penalty is None else Penalized(out, routing.penalty)


class RoutedTokens(NamedTuple):
    """What the experts that are held here compute with.

    Args:
        tokens: [T, L], sorted by expert.
        ends: [E] int32, the end of each expert's tokens; the last one is T.
        send_back: From the results [T, L] to those of the tokens that were handed over, in their order.
    """

    tokens: Tensor
    ends: Tensor
    send_back: Callable[[Tensor], Tensor]


def keep_tokens(tokens: Tensor, ends: Tensor) -> RoutedTokens:
    """Hand tokens to experts that are all held here."""
    return RoutedTokens(tokens, ends, lambda results: results)


class Experts(nn.Module):
    """The routed experts: MLPs whose projections are grouped GEMMs over the tokens sorted by expert.

    Attributes:
        exchange: From tokens [T * K, L], sorted by expert, and the ends [E] int32 of the experts' tokens, to those of
            the experts that are held here.
    """

    def __init__(self, cfg: MoeConfig, *, width: int) -> None:
        super().__init__()
        self.activation = cfg.activation
        self.num_experts = cfg.num_experts
        self.exchange: Callable[[Tensor, Tensor], RoutedTokens] = keep_tokens

        def grouped(in_features: int, out_features: int) -> GroupedLinear:
            return GroupedLinear(cfg.num_experts, in_features, out_features, uses_per_token=cfg.top_k)

        self.gate_proj = grouped(width, cfg.d_ff) if cfg.activation is Activation.swiglu else None
        self.up_proj = grouped(width, cfg.d_ff)
        self.down_proj = grouped(cfg.d_ff, width)

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """Map [T, L] to the weighted sum of each token's experts, [T, L] in the dtype of ``x``."""
        by_expert, order = routing.experts.flatten().sort(stable=True)  # positions t * K + k, grouped by expert
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        bounds = torch.arange(self.num_experts, device=x.device)
        ends = torch.searchsorted(by_expert, bounds, right=True, out_int32=True)
        tokens, ends, send_back = self.exchange(_Dispatch.apply(x, order, place), ends)
        gate = None if self.gate_proj is None else self.gate_proj(tokens, ends)
        results = self.down_proj(activate(self.up_proj(tokens, ends), gate, activation=self.activation), ends)
        return _Combine.apply(send_back(results), routing.weights, order, place)


class _Dispatch(torch.autograd.Function):
    """Copy token t to each of its places, ``place[t * K + k]``; gathers only, in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        ctx.num_tokens = len(x)
        return x[order // (len(order) // len(x))]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (place,) = ctx.saved_tensors
        copies = place.view(ctx.num_tokens, -1)
        total = torch.zeros_like(grad[: ctx.num_tokens], dtype=_precise(grad))
        for k in range(copies.shape[1]):
            total += grad[copies[:, k]]
        return total.to(grad.dtype), None, None


class _Combine(torch.autograd.Function):
    """Weighted sum, in FP32, of what a token's experts returned."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(y, weights, order, place)
        copies = place.view_as(weights)
        total = torch.zeros(len(weights), y.shape[1], dtype=_precise(y), device=y.device)
        for k in range(weights.shape[1]):
            total.addcmul_(y[copies[:, k]].to(total.dtype), weights[:, k, None].to(total.dtype))
        return total.to(y.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        y, weights, order, place = ctx.saved_tensors
        token = order // weights.shape[1]
        spread = grad[token].to(_precise(y))  # [T * K, L], sorted by expert
        grad_y = (spread * weights.flatten()[order, None]).to(y.dtype)
        grad_weights = (spread * y).sum(dim=-1)[place].view_as(weights).to(weights.dtype)
        return grad_y, grad_weights, None, None


def _precise(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
