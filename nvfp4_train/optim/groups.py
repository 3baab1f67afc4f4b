"""Which parameters decay."""

from dataclasses import dataclass

from torch import nn

# Vectors (norms, biases, Mamba's A_log, D and dt_bias) are told by their rank; a depthwise convolution's kernel has
# three dims.
_MATRIX_DIMS = 2


@dataclass(frozen=True, kw_only=True)
class DecayGroups:
    """A model's parameters by whether weight decay pulls them to zero; name to parameter, in the model's order.

    Args:
        decayed: Matrices (embeddings and output head too) and convolution kernels.
        not_decayed: Norm weights, biases and the per-head scalars of Mamba: none of them is scale-free, and decay
            would move the time constants of the state-space model.
    """

    decayed: dict[str, nn.Parameter]
    not_decayed: dict[str, nn.Parameter]


def split_by_decay(model: nn.Module) -> DecayGroups:
    """Split the parameters of `model`; a parameter that two modules share is in once, under its first name."""
    parameters = dict(model.named_parameters())
    return DecayGroups(
        decayed={name: parameter for name, parameter in parameters.items() if parameter.ndim >= _MATRIX_DIMS},
        not_decayed={name: parameter for name, parameter in parameters.items() if parameter.ndim < _MATRIX_DIMS},
    )
