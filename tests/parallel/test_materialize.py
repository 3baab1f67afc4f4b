import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from nvfp4_train.model.hybrid import build_model
from nvfp4_train.model.init import init_parameters
from nvfp4_train.parallel.apply import parallelize
from nvfp4_train.parallel.materialize import materialize, write_shard
from nvfp4_train.parallel.mesh import build_mesh
from nvfp4_train.parallel.runtime import Runtime
from tests.support.ranks import run_on_ranks
from tests.support.tiny import parallel_layout, tiny_model, torch_engine


def test_a_plain_parameter_gets_the_whole_value():
    parameter = nn.Parameter(torch.zeros(3, 2))
    write_shard(parameter, torch.arange(6.0).view(3, 2))
    assert torch.equal(parameter.detach(), torch.arange(6.0).view(3, 2))


def initialize(runtime: Runtime, seed: int) -> tuple[dict[str, Tensor], int]:
    mesh = build_mesh(parallel_layout(), runtime)
    with torch.device("meta"):
        model = build_model(tiny_model())
    parallelize(
        model, mesh=mesh, parallel_cfg=parallel_layout(), engine_cfg=torch_engine(), compute_dtype=torch.bfloat16
    )
    materialize(model, mesh=mesh, seed=seed)
    uneven = nn.Parameter(distribute_tensor(torch.zeros(5, 2), mesh.fsdp_mesh, [Shard(0)]))
    write_shard(uneven, torch.arange(10.0).view(5, 2))
    values = {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}
    values["uneven"] = uneven.full_tensor().detach()
    return values, sum(parameter.to_local().numel() for parameter in model.parameters())


@pytest.mark.distributed
def test_values_do_not_depend_on_the_layout_and_each_rank_holds_its_part():
    plain = build_model(tiny_model())
    init_parameters(plain, plain.cfg, seed=3)
    expected = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    expected["uneven"] = torch.arange(10.0).view(5, 2)
    results = run_on_ranks(initialize, 3, 3)
    for values, _ in results:
        assert values.keys() == expected.keys()
        assert all(torch.equal(values[name], expected[name]) for name in expected)
    num_parameters = sum(parameter.numel() for parameter in plain.parameters())
    assert sum(num_local for _, num_local in results) == num_parameters
