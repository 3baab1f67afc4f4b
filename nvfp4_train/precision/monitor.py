"""What the quantized modules of a model share, and what their operands left behind."""

from torch import Tensor, nn

from nvfp4_train.precision.experts import QuantizedExperts
from nvfp4_train.precision.linear import QuantizedLinear
from nvfp4_train.precision.position import RoundingPosition

_FORWARD_OPERANDS = ("fprop.x", "fprop.w", "dgrad.w", "wgrad.x")
_BACKWARD_OPERANDS = ("dgrad.dy", "wgrad.dy")


def recorded_amax(model: nn.Module) -> dict[str, Tensor]:
    """Return the largest magnitude of each quantized operand in the newest step, without waiting for the device.

    In the order of computation, so that the first one that is not finite is where a NaN or an infinity came from: the
    forward from the first layer to the last (modules are defined in the order in which they run), then the backward
    from the last to the first. Operands in high precision leave no record.

    Returns:
        Name, for example ``blocks.3.mixer.in_proj: fprop.x``, to fp32 [1].
    """
    linears = [module for module in model.modules() if isinstance(module, QuantizedLinear | QuantizedExperts)]
    order = [(linear, name) for linear in linears for name in _FORWARD_OPERANDS]
    order += [(linear, name) for linear in reversed(linears) for name in _BACKWARD_OPERANDS]
    return {f"{linear.precision.layer}: {name}": linear.amax[name] for linear, name in order if name in linear.amax}


def position_of(model: nn.Module) -> RoundingPosition | None:
    """Return the position that the quantized modules of a model share; None before the precision pass."""
    modules = (module for module in model.modules() if isinstance(module, QuantizedLinear | QuantizedExperts))
    return next((module.position for module in modules), None)
