"""Context parallelism: ranks that share every sequence, each with a contiguous part of its tokens.

Every rank along `cp` reads the same batch and computes with its part. What tokens need of each other goes through a
`RowExchange`: attention gathers keys and values, or gets those of the neighbour that its window reaches, the
convolution gets the few tokens before the part, the scan passes states, and multi-token prediction gets the few tokens
after it. Ranks of one `cp` group call all of this in the same
order, in a recomputed forward too, because nothing of it depends on the data.

Gradients of parameters need nothing here: FSDP shards over dp_shard x cp and sums there.
"""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from nvfp4_train.data.batch import Batch
from nvfp4_train.model.documents import Documents, locate_documents, take_part
from nvfp4_train.model.hybrid import HybridLM
from nvfp4_train.model.router import Router
from nvfp4_train.model.row_part import RowExchange
from nvfp4_train.parallel.amax import agree_on_amax
from nvfp4_train.parallel.collectives import gather, with_preceding
from nvfp4_train.parallel.mesh import Mesh
from nvfp4_train.precision.linear import QuantizedLinear


def apply_context(model: HybridLM, *, mesh: Mesh) -> None:
    """Let `model` compute with this rank's part of every row, in place; at degree 1 nothing changes.

    Its forward then takes tokens and labels from `cut_rows`, with ids and positions of whole rows.
    """
    degree, rank = mesh.degree("cp"), mesh.rank("cp")
    if degree == 1:
        return
    group = mesh.group("cp")
    exchange = build_row_exchange(group, rank=rank, degree=degree)
    model.locate_documents = partial(_locate_part, rank=rank, exchange=exchange)
    for module in model.modules():
        if isinstance(module, Router):
            module.sum_over_parts = exchange.sum
        elif isinstance(module, QuantizedLinear):
            agree_on_amax(module, spread="tokens", group=group)


def cut_rows(whole: Tensor, *, mesh: Mesh) -> Tensor:
    """Return this rank's part of the rows [B, S] of a batch."""
    if mesh.degree("cp") == 1:
        return whole
    size = whole.shape[1] // mesh.degree("cp")
    return whole.narrow(1, mesh.rank("cp") * size, size).contiguous()


def stream_rows(batch: Batch, *, mesh: Mesh) -> dict[str, int]:
    """Return where this rank's tokens are in the step's global batch, as `RoundingPosition.start_microbatch` takes it.

    Raises:
        ValueError: for rows that do not make parts of whole groups of 16 tokens.
    """
    first, size = batch.microbatch_index * batch.tokens.numel(), batch.tokens.shape[1]
    degree = mesh.degree("cp")
    if degree == 1:
        return {"row_offset": first}
    part = size // degree
    if size % degree or part % 16:
        raise ValueError(
            f"rows of {size} tokens do not make {degree} parts of a multiple of 16 tokens each; "
            "change batch.sequence_length or parallel.cp_degree"
        )
    return {"row_offset": first + mesh.rank("cp") * part, "segment": part, "stride": size}


def build_row_exchange(group: dist.ProcessGroup, *, rank: int, degree: int) -> RowExchange:
    """Return what the ranks of a group do together; their parts of a row follow each other by rank."""
    return RowExchange(
        num_parts=degree,
        gather=partial(_gather, group=group),
        with_preceding=partial(_with_preceding, group=group),
        preceding=partial(_preceding, group=group, rank=rank),
        following=partial(_following, group=group, rank=rank),
        carry_forward=partial(_carry, group=group, parts_before=range(rank)),
        carry_backward=partial(_carry, group=group, parts_before=range(degree - 1, rank, -1)),
        sum=partial(_sum, group=group),
    )


def _locate_part(
    document_ids: Tensor, position_ids: Tensor | None = None, *, rank: int, exchange: RowExchange
) -> Documents:
    size = document_ids.shape[1] // exchange.num_parts
    return take_part(locate_documents(document_ids, position_ids), first=rank * size, size=size, exchange=exchange)


@torch.compiler.disable
def _gather(part: Tensor, dim: int, *, group: dist.ProcessGroup) -> Tensor:
    # In BF16 too the gradients of a key or value are added up before they are rounded, as within one rank.
    return gather(part, dim=dim, group=group, sum_dtype=torch.promote_types(part.dtype, torch.float32))


@torch.compiler.disable
def _with_preceding(part: Tensor, dim: int, count: int, *, group: dist.ProcessGroup) -> Tensor:
    sum_dtype = torch.promote_types(part.dtype, torch.float32)  # as in `_gather`
    return with_preceding(part, dim=dim, count=count, group=group, sum_dtype=sum_dtype)


@torch.compiler.disable
def _preceding(x: Tensor, count: int, *, group: dist.ProcessGroup, rank: int) -> Tensor:
    size = min(count, x.shape[1])  # of parts shorter than the count, more than the neighbour is needed
    last = _gather(x[:, x.shape[1] - size :], 1, group=group)
    before = last[:, max(0, rank * size - count) : rank * size]
    return F.pad(before, (0, 0) * (x.ndim - 2) + (count - before.shape[1], 0))


@torch.compiler.disable
def _following(x: Tensor, count: int, *, group: dist.ProcessGroup, rank: int) -> Tensor:
    size = min(count, x.shape[1])
    first = _gather(x[:, :size], 1, group=group)
    after = first[:, (rank + 1) * size : (rank + 1) * size + count]
    return F.pad(after, (0, 0) * (x.ndim - 2) + (0, count - after.shape[1]))


@torch.compiler.disable
@torch.no_grad()
def _carry(value: Tensor, factor: Tensor, *, group: dist.ProcessGroup, parts_before: range) -> Tensor:
    """See `RowExchange.carry_forward`; one collective, after which each rank finds its own."""
    own = torch.cat((value.flatten(), factor.to(value.dtype).flatten()))
    of_parts = gather(own[None], dim=0, group=group, sum_dtype=own.dtype)
    entering = torch.zeros_like(value)
    for part in parts_before:
        passed, kept = of_parts[part].split((value.numel(), factor.numel()))
        entering = passed.view_as(value) + kept.view_as(factor) * entering
    return entering


@torch.compiler.disable
@torch.no_grad()
def _sum(tensor: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    total = tensor.clone()
    dist.all_reduce(total, group=group)
    return total
