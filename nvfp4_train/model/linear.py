"""The Linear that every GEMM of the model goes through."""

import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """An ``nn.Linear`` whose FP32 master weight is cast to the activation's dtype in forward.

    The precision pass replaces instances by their quantized counterpart, under the same parameter name.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply [..., in_features] by the transposed weight, in the dtype of ``x``."""
        return F.linear(x, self.weight.to(x.dtype))
