"""Where DeepSpeed is installed, and its state put together."""

from importlib.util import find_spec

import pytest
from torch import Tensor

from nvfp4_train.engine.deepspeed_engine import DeepSpeedEngine

needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="DeepSpeed is not installed (pip install 'nvfp4-train[deepspeed]')"
)


def whole_state(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    """Copies of the full masters, and of the optimizer state where there is one; all ranks must call it."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = {}
    for name, parameter in engine.model.named_parameters():
        found[name] = safe_get_full_fp32_param(parameter).detach().clone()
        for key in ("exp_avg", "exp_avg_sq") if engine.step else ():
            found[f"{name}.{key}"] = safe_get_full_optimizer_state(parameter, key).detach().clone()
    return found
