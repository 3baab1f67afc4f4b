"""Who we are among the ranks, and the process group that joins us."""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import DistNetworkError, DistStoreError, HashStore, PrefixStore, Store, TCPStore

from nvfp4_train.config.run import Device

START_TIMEOUT_SECONDS = 300.0
# Long, because rank 0 may prepare a large data set while the others wait.
COLLECTIVE_TIMEOUT_SECONDS = 3600.0

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """One rank of a running job.

    Args:
        rank: Of this process, 0 to world_size - 1.
        world_size: Number of ranks.
        local_rank: Of this process on its machine.
        device: That this rank computes on.
        backend: Of the process group.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that writes and prints."""
        return self.rank == 0

    def share(self, value: T) -> T:
        """Return the `value` of rank 0 on every rank; all ranks must call it, and it must be picklable."""
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]


def announce_local_rank() -> None:
    """Set what a launcher sets, and libraries ask for, where this process has none: it is alone on its machine."""
    os.environ.setdefault("LOCAL_RANK", "0")


def start_runtime(device: Device, *, timeout_seconds: float = START_TIMEOUT_SECONDS) -> Runtime:
    """Join the ranks that a launcher such as torchrun started, or make a job of one process where there is no launcher.

    Args:
        device: What ranks compute on; `auto` takes CUDA where there is a GPU.
        timeout_seconds: How long to wait for the other ranks.

    Raises:
        ValueError: for CUDA on a machine without a GPU or with fewer GPUs than ranks, or for half of a launcher's
            environment.
        TimeoutError: if a rank does not appear; the message names the missing ones.
    """
    rank, world_size, local_rank = (
        int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
    )
    torch_device = _pick_device(device, local_rank=local_rank)
    # DCP plans and shared objects travel over gloo even where tensors travel over nccl.
    backend = "gloo" if torch_device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if "WORLD_SIZE" in os.environ:
        store = _meet_ranks(rank=rank, world_size=world_size, timeout_seconds=timeout_seconds)
    else:
        store = HashStore()
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_SECONDS),
    )
    return Runtime(rank=rank, world_size=world_size, local_rank=local_rank, device=torch_device, backend=backend)


def stop_runtime() -> None:
    """Leave the process group."""
    dist.destroy_process_group()


def _pick_device(device: Device, *, local_rank: int) -> torch.device:
    if device is Device.cpu or (device is Device.auto and not torch.cuda.is_available()):
        return torch.device("cpu")
    num_gpus = torch.cuda.device_count()
    if local_rank >= num_gpus:
        raise ValueError(
            f"run.device = {device}: rank {local_rank} of this machine needs its own GPU, found {num_gpus}; "
            "start fewer processes per machine, or use run.device=cpu"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _meet_ranks(*, rank: int, world_size: int, timeout_seconds: float) -> Store:
    """Connect to the launcher's store and wait until every rank has signed it."""
    missing_names = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing_names:
        raise ValueError(
            f"WORLD_SIZE={world_size} is set in the environment and {', '.join(missing_names)} is not; "
            "start with torchrun, which sets them all, or unset WORLD_SIZE for a single process"
        )
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    launcher_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        server = TCPStore(
            host,
            port,
            world_size,
            is_master=rank == 0 and not launcher_serves,
            timeout=timedelta(seconds=timeout_seconds),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (DistNetworkError, DistStoreError) as error:
        raise TimeoutError(
            f"rank {rank} of {world_size} could not reach rank 0 at {host}:{port} within {timeout_seconds:.0f} s; "
            "is rank 0 running, and is the port open?"
        ) from error
    # A restarted job must not find the signatures of the ranks that died.
    store = PrefixStore(f"nvfp4_train/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", server)
    keys = [f"rank_{index}" for index in range(world_size)]
    store.set(keys[rank], "here")
    try:
        store.wait(keys, timedelta(seconds=timeout_seconds))
    except DistStoreError as error:
        missing = [index for index, key in enumerate(keys) if not store.check([key])]
        raise TimeoutError(
            f"rank {rank} waited {timeout_seconds:.0f} s for {world_size} ranks at {host}:{port}; "
            f"missing: rank {', '.join(map(str, missing))}. Look at their output, or start the job again."
        ) from error
    return store
