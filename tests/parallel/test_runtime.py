import socket
import time

import pytest
import torch
import torch.distributed as dist

from nvfp4_train.config.run import Device
from nvfp4_train.parallel.runtime import Runtime, start_runtime, stop_runtime
from tests.support.ranks import RankError, run_on_ranks

LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def launch_as(monkeypatch, *, rank: int, world_size: int, local_rank: int = 0) -> None:
    values = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**values, "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(name, str(value))


def test_without_a_launcher_it_is_a_job_of_one_process():
    runtime = start_runtime(Device.cpu)
    try:
        assert runtime == Runtime(rank=0, world_size=1, local_rank=0, device=torch.device("cpu"), backend="gloo")
        assert runtime.is_main
        assert runtime.share({"a": 1}) == {"a": 1}
        total = torch.ones(())
        dist.all_reduce(total)
        assert total == 1
    finally:
        stop_runtime()
    assert not dist.is_initialized()


def test_a_rank_that_does_not_appear_is_named(monkeypatch):
    launch_as(monkeypatch, rank=0, world_size=3)
    with pytest.raises(TimeoutError, match=r"rank 0 waited 1 s for 3 ranks at 127.0.0.1:\d+; missing: rank 1, 2"):
        start_runtime(Device.cpu, timeout_seconds=1)
    assert not dist.is_initialized()


def test_an_unreachable_first_rank_is_named(monkeypatch):
    launch_as(monkeypatch, rank=1, world_size=2)
    with pytest.raises(TimeoutError, match=r"rank 1 of 2 could not reach rank 0 at 127.0.0.1:\d+ within 1 s"):
        start_runtime(Device.cpu, timeout_seconds=1)


def test_half_the_environment_of_a_launcher_says_what_is_missing(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(ValueError, match="WORLD_SIZE=2 is set in the environment and RANK, MASTER_ADDR is not"):
        start_runtime(Device.cpu)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu_says_what_to_do():
    with pytest.raises(ValueError, match=r"run.device = cuda: .* found 0; .* run.device=cpu"):
        start_runtime(Device.cuda)


def report_rank(runtime: Runtime) -> tuple[int, int, str, bool]:
    return runtime.rank, runtime.world_size, runtime.share(f"said by {runtime.rank}"), runtime.is_main


def fail_on_rank_1(runtime: Runtime) -> None:
    if runtime.rank == 1:
        raise KeyError("the reason")
    runtime.share(None)


def sleep_on_rank_1(runtime: Runtime) -> None:
    if runtime.rank == 1:
        time.sleep(60)


@pytest.mark.distributed
def test_ranks_of_a_launcher_meet_and_share_what_rank_0_has():
    assert run_on_ranks(report_rank, 2) == [(0, 2, "said by 0", True), (1, 2, "said by 0", False)]


@pytest.mark.distributed
def test_the_test_support_shows_errors_of_any_rank_and_ends_ranks_that_hang():
    with pytest.raises(RankError, match=r"(?s)--- rank 1\n.*fail_on_rank_1.*KeyError: 'the reason'"):
        run_on_ranks(fail_on_rank_1, 2)
    with pytest.raises(RankError, match=r"rank 1 did not end within 3 s"):
        run_on_ranks(sleep_on_rank_1, 2, timeout_seconds=3)
