"""Compiling the residual blocks one by one."""

import torch

from nvfp4_train.model.hybrid import HybridLM


def compile_blocks(model: HybridLM, *, backend: str = "inductor") -> None:
    """Compile the forward of every residual block of `model`, and with it its backward, in place.

    Blocks of a kind share their code, so that compiling costs per kind and not per block. Quantized modules are left
    out: what is compiled is what lies between the Linears. It comes before activation checkpointing, which then
    recomputes by calling the compiled block: one graph for both.

    Args:
        model: Before it is sharded; names of parameters do not change.
        backend: Of `torch.compile`.
    """
    for block in model.all_blocks():
        block.forward = torch.compile(block.forward, backend=backend, dynamic=False)  # type: ignore[method-assign]
