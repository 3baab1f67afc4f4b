"""What is in a checkpoint: masters and optimizer state under the names of the model's parameters."""

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from nvfp4_train.precision.amax_history import named_histories

State = dict[str, dict[str, Any]]


def collect_state(model: nn.Module, optimizer: Optimizer) -> State:
    """Return the tensors that a checkpoint holds; they are views, so loading into them changes model and optimizer.

    In global coordinates (DTensors) and FP32, never a quantized copy, so any other layout can read them.

    Returns:
        `model`: name to master, to buffer (the routers' corrections, alike on all ranks), and to amax history of
        delayed scaling; `optimizer`: parameter name to its state by name (`exp_avg`, ...).
    """
    parameters = dict(model.named_parameters())
    return {
        "model": {name: parameter.detach() for name, parameter in parameters.items()} | common_tensors(model),
        "optimizer": {
            name: {
                key: value.detach() for key, value in optimizer.state[parameter].items() if isinstance(value, Tensor)
            }
            for name, parameter in parameters.items()
        },
    }


def common_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return what a checkpoint holds besides parameters, alike on all ranks: buffers and histories; views, too."""
    persistent = model.state_dict().keys()
    buffers = {name: buffer.detach() for name, buffer in model.named_buffers() if name in persistent}
    return buffers | named_histories(model)
