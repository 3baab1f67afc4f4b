"""The fused kernels of mamba_ssm and causal_conv1d: whether a process uses them, and how ours are called through them.

They compute what ours compute, with two differences. They add up gradients of small parameters by atomic operations, so
that a second run differs in the last bits; and sums of log-decays run across documents, so that another document moves
the last bits too, and nothing else.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from nvfp4_train.config.model import MambaConfig, MambaKernels
from nvfp4_train.model.documents import Documents
from nvfp4_train.model.ssd import import_causal_conv1d, import_mamba_ssm

_logger = logging.getLogger(__name__)

CONV_TAPS = (2, 3, 4)  # what causal_conv1d has kernels for
CONV_CHANNEL_MULTIPLE = 8  # with the channels innermost, which document ids need
FIX = "pip install 'nvfp4-train[mamba]' --no-build-isolation, or set model.mamba.kernels to auto or pytorch"


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """What a device uses; None: this package's own.

    Args:
        scan: ``mamba_chunk_scan_combined`` of mamba_ssm.
        conv: ``causal_conv1d_fn`` of causal_conv1d.
    """

    scan: Callable[..., Tensor] | None
    conv: Callable[..., Tensor] | None


OWN = Kernels(scan=None, conv=None)


@cache
def choose_kernels(choice: MambaKernels, device_type: str) -> Kernels:
    """Decide once per process and kind of device, and log it.

    Args:
        choice: Of the configuration.
        device_type: Where a block computes (``cuda``, ``cpu``, ...).

    Raises:
        ValueError: if ``mamba_ssm`` is asked for and cannot be had.
    """
    if choice is MambaKernels.pytorch:
        return _decided(OWN, "as configured")
    if device_type != "cuda":
        if choice is MambaKernels.mamba_ssm:
            raise ValueError(f"model.mamba.kernels: mamba_ssm computes on cuda, this run on {device_type}; {FIX}")
        return _decided(OWN, f"mamba_ssm has none for {device_type}")
    scan, scan_fault = _attempt(import_mamba_ssm)
    conv, conv_fault = _attempt(import_causal_conv1d)
    faults = "; ".join(fault for fault in (scan_fault, conv_fault) if fault)
    if faults and choice is MambaKernels.mamba_ssm:
        raise ValueError(f"model.mamba.kernels is mamba_ssm, but {faults}; {FIX}")
    return _decided(Kernels(scan=scan, conv=conv), faults or "both import")


def scan_kernel(cfg: MambaConfig, x: Tensor) -> Callable[..., Tensor] | None:
    """Return mamba_ssm's scan if it is to be used for ``x``: in BF16 only, because its FP32 products would be TF32."""
    return _choose(cfg.kernels, x).scan if x.dtype is torch.bfloat16 else None


def conv_kernel(choice: MambaKernels, x: Tensor, *, d_conv: int) -> Callable[..., Tensor] | None:
    """Return causal_conv1d's convolution if it is to be used for ``x`` [B, S, channels] and has a kernel for it."""
    fits = d_conv in CONV_TAPS and x.shape[-1] % CONV_CHANNEL_MULTIPLE == 0 and x.dtype is not torch.float64
    return _choose(choice, x).conv if fits else None


def _choose(choice: MambaKernels, x: Tensor) -> Kernels:
    # Off CUDA nothing but ours is ever chosen without an error: compiled graphs are not broken there.
    if choice is MambaKernels.pytorch or (choice is MambaKernels.auto and x.device.type != "cuda"):
        return OWN
    return _choose_uncompiled(choice, x.device.type)


@torch.compiler.disable
def _choose_uncompiled(choice: MambaKernels, device_type: str) -> Kernels:
    return choose_kernels(choice, device_type)


@torch.compiler.disable
def run_conv(
    kernel: Callable[..., Tensor], x: Tensor, *, weight: Tensor, bias: Tensor | None, documents: Documents
) -> Tensor:
    """Convolve [B, S, channels] and apply SiLU through ``causal_conv1d_fn``.

    Source: https://github.com/Dao-AILab/causal-conv1d, ``causal_conv1d_interface.py``: x (batch, channels, seqlen) with
    the channels innermost in memory and other strides multiples of 8, seq_idx (batch, seqlen) int32 and contiguous.
    """
    channels_inner = x.contiguous().transpose(1, 2)
    y = kernel(channels_inner, weight, bias, seq_idx=sequence_index(documents), activation="silu")
    return y.transpose(1, 2)


def sequence_index(documents: Documents) -> Tensor | None:
    """Return what both libraries call ``seq_idx``: [B, S] int32, or None where every row is one document."""
    return None if documents.one_per_row else documents.ids.to(torch.int32).contiguous()


def _attempt(load: Callable[[], Callable[..., Tensor]]) -> tuple[Callable[..., Tensor] | None, str]:
    """Return what ``load`` imports, or why it cannot."""
    name = load.__name__.removeprefix("import_")
    try:
        return load(), ""
    except (
        ImportError,
        OSError,
        RuntimeError,
        AttributeError,
    ) as error:  # the last two: built for another torch or triton
        return None, f"{name} does not import ({str(error).splitlines()[0] if str(error) else type(error).__name__})"


def _decided(kernels: Kernels, why: str) -> Kernels:
    scan = "this package" if kernels.scan is None else "mamba_ssm, in BF16"
    conv = "this package" if kernels.conv is None else "causal_conv1d"
    _logger.info("Mamba-2: the scan is that of %s, the convolution that of %s (%s)", scan, conv, why)
    return kernels
