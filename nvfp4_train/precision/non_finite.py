"""Finding where a NaN or an infinity came from, after a loss or a gradient norm turned out not to be finite."""

import torch
from torch import nn

from nvfp4_train.precision.experts import QuantizedExperts
from nvfp4_train.precision.linear import QuantizedLinear

_FORWARD_OPERANDS = ("fprop.x", "fprop.w", "dgrad.w", "wgrad.x")
_BACKWARD_OPERANDS = ("dgrad.dy", "wgrad.dy")


def find_non_finite_layer(model: nn.Module) -> str | None:
    """Name the first quantized operand of the newest step that held a NaN or an infinity.

    First means in the order of computation: the forward from the first layer to the last (modules are defined in the
    order in which they run), then the backward from the last to the first. Operands in high precision leave no
    record. Waits for the
    device: call it after a failure only.

    Returns:
        For example ``blocks.3.mixer.in_proj: fprop.x``, or None if every record is finite.
    """
    linears = [module for module in model.modules() if isinstance(module, QuantizedLinear | QuantizedExperts)]
    records = [(linear, name) for linear in linears for name in _FORWARD_OPERANDS if name in linear.amax]
    records += [(linear, name) for linear in reversed(linears) for name in _BACKWARD_OPERANDS if name in linear.amax]
    if not records:
        return None
    is_finite = torch.stack([linear.amax[name].max() for linear, name in records]).isfinite().tolist()
    for (linear, name), finite in zip(records, is_finite, strict=True):
        if not finite:
            return f"{linear.precision.layer}: {name}"
    return None
