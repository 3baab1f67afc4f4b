"""Optimizers give the same result whatever part of a parameter each rank holds."""

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from nvfp4_train.optim.sharding import Sharding
from nvfp4_train.parallel.mesh import build_mesh
from nvfp4_train.parallel.optimizer_sharding import dtensor_sharding, map_whole
from nvfp4_train.parallel.runtime import Runtime
from tests.support.ranks import run_on_ranks
from tests.support.tiny import parallel_layout

# uneven shards, more ranks than rows, experts
SHAPES = ((8, 6), (7, 6), (2, 5), (8, 6), (8, 6), (3, 4, 6), (8, 6))


def matrices() -> list[Tensor]:
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=rng) for shape in SHAPES]


def scaled_inverse(index: int):
    """Depends on all of a matrix, and on which one it is."""
    return lambda matrix: matrix / matrix.norm(dim=(-2, -1), keepdim=True) + index


def expected() -> list[Tensor]:
    return [scaled_inverse(index)(matrix) for index, matrix in enumerate(matrices())]


def map_layouts(runtime: Runtime) -> list[float]:
    mesh = build_mesh(parallel_layout(shard=2, tp=2), runtime)
    cases = [
        (mesh.dense["fsdp"], [Shard(0)]),
        (mesh.dense["tp"], [Shard(1)]),
        (mesh.dense["fsdp"], [Replicate()]),
        (mesh.dense["fsdp", "tp"], [Shard(0), Shard(1)]),
        (mesh.dense["fsdp", "tp"], [Replicate(), Shard(0)]),
        (mesh.dense["fsdp", "tp"], [Shard(0), Replicate()]),
    ]
    worst = []
    for device_mesh, placements in cases:
        tensors = [distribute_tensor(matrix, device_mesh, placements, src_data_rank=None) for matrix in matrices()]
        found = map_whole(tensors, [scaled_inverse(index) for index in range(len(SHAPES))])
        differences = [0.0]
        for tensor, result, whole in zip(tensors, found, expected(), strict=True):
            wanted = distribute_tensor(whole, device_mesh, placements, src_data_rank=None).to_local()
            assert result.shape == tensor.to_local().shape
            differences += (result - wanted).abs().flatten().tolist()
        worst.append(max(differences))
    return worst


@pytest.mark.distributed
def test_whole_matrices_of_every_layout():
    for worst in run_on_ranks(map_layouts, 4):
        assert worst == [0.0] * len(worst)


def test_plain_tensors_are_whole():
    for sharding in (Sharding(), dtensor_sharding()):
        found = sharding.map_whole(matrices(), [scaled_inverse(index) for index in range(len(SHAPES))])
        assert all(torch.equal(a, b) for a, b in zip(found, expected(), strict=True))


def zeros_of_a_shard(runtime: Runtime) -> tuple[bool, torch.Size, torch.Size, torch.dtype]:
    mesh = build_mesh(parallel_layout(), runtime)
    tensor = distribute_tensor(matrices()[1], mesh.fsdp_mesh, [Shard(0)], src_data_rank=None)
    zeros = dtensor_sharding().zeros_like(tensor, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert isinstance(zeros, DTensor)
    assert zeros.placements == tensor.placements
    return bool(zeros.full_tensor().any()), zeros.shape, zeros.to_local().shape, zeros.dtype


@pytest.mark.distributed
def test_state_has_the_layout_of_its_parameter():
    found = run_on_ranks(zeros_of_a_shard, 2)
    assert found == [(False, (7, 6), (4, 6), torch.bfloat16), (False, (7, 6), (3, 6), torch.bfloat16)]
