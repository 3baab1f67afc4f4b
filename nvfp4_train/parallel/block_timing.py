"""How long each block takes on the device, so that stages can be balanced by time.

A block of each sort runs forward and backward over one sequence, whole and apart from the model; so do the two ends.
What the parallel pass changes later (shares of a layer, compiling, recomputing) changes all blocks alike, or nearly so.
"""

import logging
import statistics
import time
from collections.abc import Callable
from copy import deepcopy

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nvfp4_train.config.problem import ConfigError, Problem
from nvfp4_train.model.block import run_blocks
from nvfp4_train.model.documents import locate_documents
from nvfp4_train.model.hybrid import HybridLM, stream_dtype
from nvfp4_train.model.init import init_parameters
from nvfp4_train.model.model_part import ModelPart
from nvfp4_train.parallel.mesh import Mesh
from nvfp4_train.parallel.stages import BlockCosts

_logger = logging.getLogger(__name__)

NUM_REPEATS = 3  # after one that is not counted; the median of them


def shared_block_times(model: HybridLM, *, sequence_length: int, mesh: Mesh) -> BlockCosts:
    """Return the seconds that rank 0 measures, on every rank, so that all of them divide the model alike.

    Args:
        model: As for `block_times`.
        sequence_length: Tokens of a sequence.
        mesh: Of all ranks.

    Raises:
        ConfigError: on every rank, if one device has not the memory for a whole block.
    """
    box: list[BlockCosts | str] = [""]
    if dist.get_rank() == 0:
        try:
            box[0] = block_times(model, sequence_length=sequence_length, device=mesh.device)
        except torch.OutOfMemoryError as error:
            box[0] = str(error)
    dist.broadcast_object_list(box, src=0)
    costs = box[0]
    if isinstance(costs, str):
        rule = f"needs a whole block and a sequence of {sequence_length} tokens to fit one device ({costs})"
        fix = "use flops, or put | into model.pattern"
        raise ConfigError([Problem(key="parallel.stage_balance", value="time", rule=rule, fix=fix)])
    return costs


def block_times(model: HybridLM, *, sequence_length: int, device: torch.device) -> BlockCosts:
    """Measure the seconds of a forward and a backward over one sequence, a single document.

    Blocks that are alike, which includes what their Linears compute, are measured once. One of them at a time takes
    memory.

    Args:
        model: Whole, on the meta device, after the precision pass; it is not changed.
        sequence_length: Tokens of the sequence.
        device: To compute on.
    """
    rng = torch.Generator().manual_seed(0)
    dtype = stream_dtype(model.cfg, model.compute_dtype)
    stream = torch.randn(1, sequence_length, model.cfg.d_model, generator=rng).to(device, dtype)
    tokens = torch.randint(model.cfg.vocab_size, (1, sequence_length), generator=rng).to(device)
    documents = locate_documents(torch.zeros_like(tokens))

    def run_block(block: nn.Module) -> Tensor:
        return run_blocks([block], stream.clone().requires_grad_(), documents, penalties=[])

    def run_end(part: nn.Module) -> Tensor:
        values = () if part.is_first else (stream.clone().requires_grad_(),)
        result = part(*values, tokens=tokens, document_ids=documents.ids, position_ids=None, labels=tokens)
        return result[0] if isinstance(result, tuple) else result

    seconds: dict[str, float] = {}
    blocks = []
    for index, block in enumerate(model.blocks.children()):
        sort = str(block)
        if sort not in seconds:
            seconds[sort] = _measure(f"blocks.{index}", block, run_block, model=model, device=device)
        blocks.append(seconds[sort])
    ends = [ModelPart(model, blocks=(), is_first=is_first, is_last=not is_first) for is_first in (True, False)]
    before, after = (_measure("", end, run_end, model=model, device=device) for end in ends)
    costs = BlockCosts(blocks=blocks, before=before, after=after)
    _logger.info(
        "milliseconds of the embedding, each block and the end, by which stages are divided: %s",
        ", ".join(f"{1e3 * value:.3g}" for value in (before, *blocks, after)),
    )
    return costs


def _measure(
    name: str, module: nn.Module, forward: Callable[[nn.Module], Tensor], *, model: HybridLM, device: torch.device
) -> float:
    """Return the median seconds of a forward and a backward of a copy of `module`, which has this name in `model`."""
    copy = deepcopy(module).to_empty(device=device)
    init_parameters(_named(name, copy), model.cfg, seed=0)
    times = []
    for _ in range(1 + NUM_REPEATS):
        _finish_queue(device)
        started = time.perf_counter()
        result = forward(copy)
        result.backward(torch.ones_like(result))
        _finish_queue(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def _named(name: str, module: nn.Module) -> nn.Module:
    """Return a module whose parameters have the names that they have in the whole model."""
    for part in reversed(name.split(".") if name else ()):
        module = nn.ModuleDict({part: module})
    return module


def _finish_queue(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()
