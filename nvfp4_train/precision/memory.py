"""How much memory the Linears keep between forward and backward."""

from torch import nn

from nvfp4_train.precision.experts import QuantizedExperts
from nvfp4_train.precision.linear import QuantizedLinear


def saved_bytes(model: nn.Module) -> int:
    """Return the bytes that the Linears of this rank kept of their inputs in the newest microbatch with a backward.

    Weights are not counted: they are kept once, however many microbatches a step has. Does not wait for the device.
    """
    return sum(
        module.saved_bytes for module in model.modules() if isinstance(module, QuantizedLinear | QuantizedExperts)
    )
