"""The model's C++ kernels for CPUs: fused passes over activations, which have plain PyTorch definitions next door."""

from pathlib import Path

import torch
from torch import Tensor

from nvfp4_train.numerics.kernels.loader import FLAGS, Program, is_compiled

# Contraction to FMA: the kernels are held to their definitions within rounding, not bit for bit.
PROGRAM = Program.of(
    "the model",
    Path(__file__).parent,
    sources="scan.cpp attention.cpp norm.cpp conv.cpp pointwise.cpp",
    headers="simd.h products.h scratch.h ../../numerics/kernels/pages.h",
    flags=(*(flag for flag in FLAGS if not flag.startswith("-ffp-contract")), "-ffp-contract=fast"),
)
DTYPES = (torch.float32, torch.bfloat16)


def is_fused(x: Tensor) -> bool:
    """Say whether the kernels handle x: FP32 or BF16 on a CPU, where they can be built and were not ruled out."""
    return x.dtype in DTYPES and is_compiled(x, PROGRAM)
