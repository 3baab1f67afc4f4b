import pytest
import torch

from nvfp4_train.config.batch import BatchConfig, RampConfig
from nvfp4_train.config.problem import ConfigError
from nvfp4_train.config.run import Device
from nvfp4_train.parallel.mesh import build_mesh
from nvfp4_train.parallel.runtime import Runtime, start_runtime, stop_runtime
from tests.support.ranks import run_on_ranks
from tests.support.tiny import parallel_layout


@pytest.fixture(scope="module")
def runtime():
    yield start_runtime(Device.cpu)
    stop_runtime()


def batch(*, micro: int, total: int, ramp: tuple[int, int, int] = (0, 0, 0)) -> BatchConfig:
    start, increment, tokens = ramp
    return BatchConfig(
        sequence_length=16,
        micro_batch_size=micro,
        global_batch_size=total,
        ramp=RampConfig(start=start, increment=increment, tokens=tokens),
    )


def test_one_rank_is_a_mesh_of_ones(runtime):
    mesh = build_mesh(parallel_layout(), runtime)
    assert (mesh.dp_rank, mesh.dp_degree, mesh.degree("dp_shard"), mesh.degree("dp_replicate")) == (0, 1, 1, 1)
    value = torch.tensor([1.5, 2.0])
    total = mesh.sum_over_data(value)
    assert torch.equal(total, value)
    assert total is not value


def test_degrees_that_do_not_multiply_to_the_ranks_are_refused(runtime):
    with pytest.raises(
        ConfigError, match=r"parallel = dp_replicate_degree 2 x dp_shard_degree 3 = 6\n.* there are 1\n.*start 6 ranks"
    ):
        build_mesh(parallel_layout(replicate=2, shard=3), runtime)
    with pytest.raises(ConfigError, match=r"dp_replicate_degree 2 x dp_shard_degree 1 = 2\n.* there are 1\n"):
        build_mesh(parallel_layout(replicate=2), runtime)


def test_a_batch_that_does_not_split_evenly_is_refused(runtime):
    mesh = build_mesh(parallel_layout(), runtime)
    mesh.check_batch(batch(micro=2, total=8))
    mesh.check_batch(batch(micro=2, total=8, ramp=(4, 2, 100)))


def describe_meshes(runtime: Runtime) -> dict[str, tuple]:
    found = {}
    for name, cfg in {
        "replicate": parallel_layout(replicate=4),
        "shard": parallel_layout(),
        "hybrid": parallel_layout(replicate=2),
    }.items():
        mesh = build_mesh(cfg, runtime)
        total = mesh.sum_over_data(torch.tensor(10.0**runtime.rank))
        complaints = []
        for sizes in (batch(micro=2, total=12), batch(micro=2, total=16, ramp=(8, 4, 100))):
            with pytest.raises(ConfigError) as caught:
                mesh.check_batch(sizes)
            complaints += [(problem.key, problem.value, problem.rule) for problem in caught.value.problems]
        found[name] = (mesh.dp_rank, mesh.dp_degree, mesh.fsdp_mesh.shape, total.item(), complaints)
    return found


@pytest.mark.distributed
def test_four_ranks():
    found = run_on_ranks(describe_meshes, 4)
    rule = "must be a multiple of micro_batch_size x data-parallel ranks = 2 x 4 = 8"
    complaints = [("batch.global_batch_size", 12, rule), ("batch.ramp.increment", 4, rule)]
    for rank, meshes in enumerate(found):
        assert meshes == {
            "replicate": (rank, 4, (4, 1), 1111.0, complaints),
            "shard": (rank, 4, (4,), 1111.0, complaints),
            "hybrid": (rank, 4, (2, 2), 1111.0, complaints),
        }


def describe_every_axis(runtime: Runtime) -> tuple[dict[str, int], dict[str, float]]:
    mesh = build_mesh(parallel_layout(shard=2, cp=2, tp=2, ep=2), runtime)
    mark = torch.tensor(10.0**runtime.rank)
    sums = {"data": mesh.sum_over_data(mark).item(), "tokens": mesh.sum_over_tokens(mark).item()}
    assert mesh.sum_over_ranks(mark).item() == 11111111.0
    assert mesh.max_over_tokens(mark).item() == 10.0 ** (6 + mesh.rank("tp"))
    assert (mesh.fsdp_mesh.shape, mesh.expert_fsdp_mesh.shape) == ((4,), (2,))
    return {axis: mesh.rank(axis) for axis in ("pp", "dp_shard", "cp", "tp", "ep")}, sums


@pytest.mark.distributed
def test_eight_ranks_along_every_axis():
    found = run_on_ranks(describe_every_axis, 8)
    for rank, (axes, sums) in enumerate(found):
        # experts are spread over neighbours among the ranks that hold different tokens
        assert axes == {"pp": 0, "dp_shard": rank // 4, "cp": rank // 2 % 2, "tp": rank % 2, "ep": rank // 2 % 2}
        assert sums["data"] == sum(10.0**other for other in range(8) if other % 4 == rank % 4)
        assert sums["tokens"] == sum(10.0**other for other in range(8) if other % 2 == rank % 2)


def test_experts_need_ranks_to_be_spread_over(runtime):
    with pytest.raises(ConfigError, match=r"ep_degree = 2\n.*must divide dp_shard_degree x cp_degree = 1 x 1 = 1"):
        build_mesh(parallel_layout(ep=2), runtime)
