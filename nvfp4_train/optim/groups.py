"""Which parameters decay, and which are matrices that an update treats as such."""

from dataclasses import dataclass

from torch import nn

# Vectors (norms, biases, Mamba's A_log, D and dt_bias) are told by their rank; a depthwise convolution's kernel has
# three dims.
_MATRIX_DIMS = 2
# Modules whose weights have rows or columns that stand for tokens, or taps: AdamW's, whatever their shape.
_NOT_MATRICES = ("embedding", "lm_head", "conv1d")


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


@dataclass(frozen=True, kw_only=True)
class ShapeGroups:
    """A model's parameters by whether they are matrices between two spaces of features.

    Args:
        matrices: Weights [M, N] of projections and routers, and [E, M, N] of experts.
        others: Embeddings, output head, convolution kernels, norms, biases, scalars of Mamba.
    """

    matrices: dict[str, nn.Parameter]
    others: dict[str, nn.Parameter]


def split_by_shape(model: nn.Module) -> ShapeGroups:
    """Split the parameters of `model` for an optimizer that orthogonalizes matrices."""
    parameters = dict(model.named_parameters())
    matrices = {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.ndim >= _MATRIX_DIMS and name.split(".")[-2] not in _NOT_MATRICES
    }
    return ShapeGroups(
        matrices=matrices, others={name: value for name, value in parameters.items() if name not in matrices}
    )
