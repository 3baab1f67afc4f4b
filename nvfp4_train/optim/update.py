"""One update, applied or skipped without asking the device."""

from torch import Tensor
from torch.optim import Optimizer


def apply_update(optimizer: Optimizer, *, lr: float, weight_decay: float, skip: Tensor) -> None:
    """Let `optimizer` update its parameters, and forget their gradients.

    Args:
        optimizer: From `build_optimizer`.
        lr: Learning rate of this step.
        weight_decay: Decay, in this step, of the parameters that decay.
        skip: FP32 scalar on the parameters' device; where it is 1, parameters and optimizer state stay as they are.
    """
    set_schedule(optimizer, lr=lr, weight_decay=weight_decay)
    # PyTorch's fused optimizers read this attribute in `step`; it is how GradScaler tells them of an overflow.
    optimizer.found_inf = skip  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def set_schedule(optimizer: Optimizer, *, lr: float, weight_decay: float) -> None:
    """Tell `optimizer` the learning rate of the next update, and the decay of the parameters that decay."""
    for group in optimizer.param_groups:
        group["lr"] = lr
        group["weight_decay"] = weight_decay if group["decays"] else 0.0
