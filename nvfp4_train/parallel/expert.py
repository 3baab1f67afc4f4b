"""Expert parallelism: each rank of a group holds some of the experts, and tokens travel to where their experts are.

Ranks along `ep` are neighbours among dp_shard x cp, so that they hold different tokens. Each expert's weight is on one
of them (and, sharded by FSDP, on the ranks that have the same place in other groups). No token is dropped: ranks tell
each other how many tokens each expert gets, send the tokens in one all-to-all and get the results back in another.

An expert sees the tokens of all ranks of its group together, ordered by the rank that they come from. Its gradient is
then the sum over the group already: FSDP sums over the other groups only.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from nvfp4_train.model.hybrid import HybridLM
from nvfp4_train.model.moe import Experts, RoutedTokens
from nvfp4_train.model.part import ParameterPart
from nvfp4_train.parallel.collectives import all_to_all, gather
from nvfp4_train.parallel.mesh import Mesh
from nvfp4_train.precision.experts import QuantizedExperts


def apply_expert(model: HybridLM, *, mesh: Mesh) -> None:
    """Spread the routed experts of `model` over the ranks, in place, after tensor parallelism and before FSDP.

    At degree 1 nothing changes.
    """
    if mesh.degree("ep") == 1:
        return
    for module in model.modules():
        if isinstance(module, Experts):
            _spread(module, mesh=mesh)


class TokenExchange:
    """Sends tokens to the ranks that hold their experts.

    Args:
        group: The ranks, which hold equally many experts each, in order.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    @torch.compiler.disable
    def __call__(self, tokens: Tensor, ends: Tensor) -> RoutedTokens:
        """Exchange the tokens of all ranks; waits for the device, because the host has to know how many go where.

        Args:
            tokens: [T, L] of this rank, sorted by expert.
            ends: [E] int32, the end of each expert's tokens.

        Returns:
            The tokens of this rank's experts, sorted by expert and then by the rank that they come from.
        """
        group, num_ranks = self._group, self._group.size()
        counts = ends.long().diff(prepend=ends.new_zeros(1, dtype=torch.int64))
        of_ranks = gather(counts[None], dim=0, group=group, sum_dtype=counts.dtype)  # [ranks, E]
        by_owner = of_ranks.unflatten(1, (num_ranks, -1))  # [source, owner, E of an owner]
        own = by_owner[:, group.rank()]  # [source, E of an owner]
        sizes = torch.stack((by_owner[group.rank()].sum(dim=1), own.sum(dim=1))).tolist()
        sent, received = cast(list[int], sizes[0]), cast(list[int], sizes[1])
        arrived = all_to_all(tokens, sent=sent, received=received, group=group)
        expert = torch.arange(own.shape[1], device=tokens.device).repeat(num_ranks)
        order = expert.repeat_interleave(own.flatten(), output_size=len(arrived)).argsort(stable=True)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))

        def send_back(results: Tensor) -> Tensor:
            by_source = _Permute.apply(results, place, order)
            return all_to_all(by_source, sent=received, received=sent, group=group)

        return RoutedTokens(
            tokens=_Permute.apply(arrived, order, place),
            ends=own.sum(dim=0).cumsum(dim=0).to(ends.dtype),
            send_back=send_back,
        )


class _Permute(torch.autograd.Function):
    """Rows in another order; gathers only, in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad[inverse], None, None


def _spread(experts: Experts, *, mesh: Mesh) -> None:
    degree, rank = mesh.degree("ep"), mesh.rank("ep")
    if experts.num_experts % degree:
        raise ValueError(
            f"parallel.ep_degree = {degree} must divide model.moe.num_experts = {experts.num_experts}; change one"
        )
    experts.exchange = TokenExchange(mesh.group("ep"))
    for grouped in (experts.gate_proj, experts.up_proj, experts.down_proj):
        if grouped is None:
            continue
        assert isinstance(grouped, QuantizedExperts)
        if not isinstance(grouped.weight, DTensor):  # tensor parallelism spreads both ways at once
            _distribute(grouped, mesh.expert["ep"])
        grouped.num_experts //= degree
        grouped.first_expert = rank * grouped.num_experts
        grouped.num_sources = degree


def _distribute(grouped: QuantizedExperts, mesh: DeviceMesh) -> None:
    # Without a source rank nothing is sent: values come later, and are the same everywhere.
    spread = distribute_tensor(grouped.weight.detach(), mesh, (Shard(0),), src_data_rank=None)
    grouped.weight = nn.Parameter(spread, requires_grad=grouped.weight.requires_grad)
    grouped.part = ParameterPart(local=lambda parameter: cast(DTensor, parameter).to_local(), gradient=_gradient_of)


def _gradient_of(parameter: Tensor) -> Callable[[Tensor], Tensor]:
    spread = cast(DTensor, parameter)
    mesh, placements = spread.device_mesh, spread.placements
    return lambda gradient: DTensor.from_local(gradient, mesh, placements, run_check=False)
