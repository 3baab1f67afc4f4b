"""Initialization: one distribution per kind of parameter, one random stream per parameter name."""

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from nvfp4_train.config.model import MambaConfig, ModelConfig

MATRICES = (
    "embedding",
    "lm_head",
    "in_proj",
    "qkv_proj",
    "up_proj",
    "gate_proj",
    "router",
    "fc1_latent_proj",
    "eh_proj",
)
NORMS = ("norm", "final_norm", "q_norm", "k_norm", "enorm", "hnorm")
A_RANGE = (1.0, 16.0)  # decay rates A of the heads are uniform in it


def copy_value(parameter: nn.Parameter, value: Tensor) -> None:
    """Overwrite a plain parameter by its full value."""
    with torch.no_grad():
        parameter.copy_(value)


def init_parameters(
    model: nn.Module, cfg: ModelConfig, *, seed: int, write: Callable[[nn.Parameter, Tensor], None] = copy_value
) -> None:
    """Give every parameter, and every buffer, its initial value.

    Each value is drawn on the CPU from a generator seeded by (seed, parameter name): it depends neither on the order of
    parameters, nor on what else the model holds, nor on how the model is laid out over devices.

    Args:
        model: A ``HybridLM``, or a part of one with the same parameter names.
        cfg: The model's configuration.
        seed: Seed of the run.
        write: Called with each parameter and its full FP32 value on the CPU; a sharded layout passes its own.
    """
    for name, parameter in model.named_parameters():
        write(parameter, initial_value(name, shape=parameter.shape, cfg=cfg, seed=seed))
    for buffer in model.buffers():  # the routers' corrections and counts
        buffer.zero_()


def initial_value(name: str, *, shape: torch.Size, cfg: ModelConfig, seed: int) -> Tensor:
    """Draw the initial value of the parameter called ``name``: FP32 on the CPU, of global shape ``shape``.

    Raises:
        ValueError: if the name is not one of a ``HybridLM``.

    Source: Megatron-LM's hybrid models: normal matrices, those that write to the residual stream divided by
    sqrt(number of blocks) because a hybrid block adds to it once (a transformer layer adds twice), and Mamba-2's own
    distributions for the scan and the convolution (https://github.com/state-spaces/mamba, ``Mamba2``). Hugging Face's
    NemotronH differs: it sets A to 1, 2, 3, ...
    """
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    rng = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    match name.split(".")[-2:]:
        case ["out_proj" | "o_proj" | "down_proj" | "fc2_latent_proj", "weight"]:
            shrink = math.sqrt(len(cfg.layer_kinds)) if cfg.rescale_prenorm_residual else 1.0
            return _normal(shape, std=cfg.init_std / shrink, rng=rng)
        case [module, "weight"] if module in MATRICES:
            return _normal(shape, std=cfg.init_std, rng=rng)
        case [module, "weight"] if module in NORMS:
            return torch.ones(shape)
        case ["scan", "D"]:
            return torch.ones(shape)
        case [module, "bias"] if module.endswith("_proj"):
            return torch.zeros(shape)
        case ["conv1d", "weight" | "bias"]:  # the default of nn.Conv1d: Kaiming uniform with a = sqrt(5), fan-in = taps
            bound = 1 / math.sqrt(cfg.mamba.d_conv)
            return _uniform(shape, low=-bound, high=bound, rng=rng)
        case ["scan", "A_log"]:
            return _uniform(shape, low=A_RANGE[0], high=A_RANGE[1], rng=rng).log()
        case ["scan", "dt_bias"]:
            return _dt_bias(shape, cfg=cfg.mamba, rng=rng)
    raise ValueError(f"no initialization is known for the parameter {name!r}")


def _normal(shape: torch.Size, *, std: float, rng: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=rng, dtype=torch.float32).mul_(std)


def _uniform(shape: torch.Size, *, low: float, high: float, rng: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=rng, dtype=torch.float32).mul_(high - low).add_(low)


def _dt_bias(shape: torch.Size, *, cfg: MambaConfig, rng: torch.Generator) -> Tensor:
    """Draw dt log-uniformly and return the bias whose softplus is dt."""
    low, high = math.log(cfg.dt_init_min), math.log(cfg.dt_init_max)
    dt = _uniform(shape, low=low, high=high, rng=rng).exp().clamp_(min=cfg.dt_init_floor)
    return dt + torch.log(-torch.expm1(-dt))
