"""Causal depthwise convolution within documents."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nvfp4_train.config.model import MambaKernels
from nvfp4_train.model.documents import Documents
from nvfp4_train.model.mamba_kernels import conv_kernel, run_conv


class CausalConv1d(nn.Module):
    """Mix each channel with its own ``d_conv - 1`` past tokens of the same document, then apply SiLU, in FP32.

    ``weight`` is [channels, d_conv]; its last tap multiplies the current token.

    Attributes:
        kernels: What convolves.
    """

    keep_fp32 = True

    def __init__(self, channels: int, *, d_conv: int, bias: bool) -> None:
        super().__init__()
        self.kernels = MambaKernels.auto
        self.weight = nn.Parameter(torch.empty(channels, d_conv))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def forward(self, x: Tensor, documents: Documents, *, preceding: Tensor | None = None) -> Tensor:
        """Convolve along S and apply SiLU.

        Args:
            x: [B, S, channels].
            documents: Of the tokens of ``x``.
            preceding: [B, d_conv - 1, channels] of the tokens before each row's first, zeros for those that are not of
                its document; None: the row begins a document.

        Returns:
            [B, S, channels] in the dtype of ``x``.
        """
        if preceding is None and (kernel := conv_kernel(self.kernels, x, d_conv=self.weight.shape[1])) is not None:
            return run_conv(kernel, x, weight=self.weight, bias=self.bias, documents=documents)
        document_ids = None if documents.one_per_row else documents.ids
        if preceding is None:
            return _ConvolveSilu.apply(x, self.weight, self.bias, document_ids)
        halo = preceding.shape[1]
        if document_ids is not None:
            document_ids = torch.cat((document_ids[:, :1].expand(-1, halo), document_ids), dim=1)
        return _ConvolveSilu.apply(torch.cat((preceding, x), dim=1), self.weight, self.bias, document_ids)[:, halo:]


class _ConvolveSilu(torch.autograd.Function):
    """The convolution as ``d_conv`` shifted products; recomputed in backward, so that only its input is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, document_ids: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, bias, document_ids)
        return F.silu(_convolve(x.to(weight.dtype), weight=weight, bias=bias, document_ids=document_ids)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        x, weight, bias, document_ids = ctx.saved_tensors
        precise = x.to(weight.dtype)
        z = _convolve(precise, weight=weight, bias=bias, document_ids=document_ids)
        grad_z = torch.ops.aten.silu_backward(grad_y.to(weight.dtype), z)
        taps = weight.T.contiguous()
        grad_taps = torch.zeros_like(taps)
        grad_taps[-1] = (grad_z * precise).sum(dim=(0, 1))
        grad_x = grad_z * taps[-1]
        for age in _ages(weight, size=x.shape[1]):
            reached = grad_z[:, age:]
            if document_ids is not None:
                reached = reached * _same_document(document_ids, age=age, dtype=weight.dtype)
            grad_x[:, :-age].addcmul_(reached, taps[-1 - age])
            grad_taps[-1 - age] = (reached * precise[:, :-age]).sum(dim=(0, 1))
        grad_bias = None if bias is None else grad_z.sum(dim=(0, 1))
        return grad_x.to(x.dtype), grad_taps.T, grad_bias, None


def _convolve(x: Tensor, *, weight: Tensor, bias: Tensor | None, document_ids: Tensor | None) -> Tensor:
    taps = weight.T.contiguous()  # [K, channels]
    z = x * taps[-1] if bias is None else torch.addcmul(bias, x, taps[-1])
    for age in _ages(weight, size=x.shape[1]):
        past = x[:, :-age]
        if document_ids is not None:
            past = past * _same_document(document_ids, age=age, dtype=x.dtype)
        z[:, age:].addcmul_(past, taps[-1 - age])
    return z


def _ages(weight: Tensor, *, size: int) -> range:
    """Distances to the past tokens that a sequence of ``size`` tokens has."""
    return range(1, min(weight.shape[1], size))


def _same_document(document_ids: Tensor, *, age: int, dtype: torch.dtype) -> Tensor:
    """Return [B, S - age, 1]: 1 where a token and the one ``age`` tokens before it share a document, else 0."""
    return (document_ids[:, age:] == document_ids[:, :-age])[..., None].to(dtype)
