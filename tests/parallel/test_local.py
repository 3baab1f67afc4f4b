from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from nvfp4_train.config.run import Device
from nvfp4_train.parallel.local import local_part
from nvfp4_train.parallel.mesh import build_mesh
from nvfp4_train.parallel.runtime import Runtime, start_runtime, stop_runtime
from tests.support.tiny import parallel_layout


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    yield start_runtime(Device.cpu)
    stop_runtime()


def test_a_plain_parameter_is_its_own_part():
    parameter = nn.Parameter(torch.ones(2))
    assert local_part(parameter) is parameter


def test_the_part_of_a_dtensor_is_its_local_tensor(runtime):
    mesh = build_mesh(parallel_layout(), runtime).fsdp_mesh
    parameter = nn.Parameter(distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]))
    part = local_part(parameter)
    assert type(part) is not type(parameter)
    assert part.tolist() == [0, 1, 2, 3]


def test_the_padding_of_a_shard_is_not_a_part(runtime):
    parameter = nn.Parameter(torch.empty(0))
    parameter.ds_tensor = torch.tensor([1.0, 2.0, 3.0, float("nan")])
    parameter.ds_numel, parameter.ds_process_group = 3, None
    assert local_part(parameter).tolist() == [1, 2, 3]
