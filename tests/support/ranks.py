"""Runs a function on several gloo ranks of this machine."""

import gc
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.distributed import TCPStore

from nvfp4_train.config.run import Device
from nvfp4_train.parallel.runtime import start_runtime, stop_runtime

# The other ranks of one that failed wait for it in a collective; what they would say is noise.
GRACE_SECONDS = 3.0
# What the ranks of most tests import, which would take each of them two seconds.
PRELOADED = ["pytest", "torch.distributed.checkpoint", "tests.support.engines", "tests.support.runs", __name__]


class RankError(AssertionError):
    """A rank raised, died or did not end in time."""


@dataclass
class _Rank:
    index: int
    process: BaseProcess
    pipe: Connection


def run_on_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout_seconds: float = 120.0) -> list[Any]:
    """Call `fn(runtime, *args)` on `world_size` new processes joined by gloo and return its results, by rank.

    `fn` is a function of a module's top level; arguments and results are pickled. One call costs about a second, so
    let one call compute many cases.

    Raises:
        RankError: with the traceback of each rank that raised, or the ranks that did not end in time.
    """
    return call_on_ranks(_join_and_call, world_size, fn, *args, timeout_seconds=timeout_seconds)


def _join_and_call(fn: Callable[..., Any], *args: Any) -> Any:
    return fn(start_runtime(Device.cpu, timeout_seconds=60), *args)


def call_on_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout_seconds: float = 120.0) -> list[Any]:
    """Call `fn(*args)` on processes that find what torchrun would have told them; otherwise as `run_on_ranks`."""
    # The server forks: ranks start without importing anything again, and without the threads of this process.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_seconds))
    ranks = []
    for index in range(world_size):
        ours, theirs = context.Pipe(duplex=False)
        environment = _environment(index, world_size=world_size, port=store.port)
        process = context.Process(target=_rank_main, args=(theirs, environment, fn, args), daemon=True)
        process.start()
        theirs.close()
        ranks.append(_Rank(index, process, ours))
    try:
        return _collect(ranks, timeout_seconds=timeout_seconds)
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.join()


def _environment(index: int, *, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(index),
        "LOCAL_RANK": str(index),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the calling process serves the store, so no port is ever taken twice
    }


def _rank_main(pipe: Connection, environment: dict[str, str], fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    gc.freeze()  # collections pass over what was loaded before the fork, whose pages then stay shared
    try:
        result = pickle.dumps(("result", fn(*args)))
    except BaseException:  # noqa: BLE001 - whatever it is, the test has to show it
        pipe.send_bytes(pickle.dumps(("error", traceback.format_exc())))
        os._exit(1)  # no clean-up: it would wait for the other ranks
    pipe.send_bytes(result)
    if torch.distributed.is_initialized():
        stop_runtime()


def _collect(ranks: list[_Rank], *, timeout_seconds: float) -> list[Any]:
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    deadline = time.monotonic() + timeout_seconds
    pending = {rank.pipe: rank for rank in ranks}
    while pending and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(list(pending), timeout=left):
            rank = pending.pop(pipe)  # type: ignore[call-overload]
            try:
                kind, value = pickle.loads(rank.pipe.recv_bytes())
            except EOFError:
                rank.process.join()
                kind, value = "error", f"died with exit code {rank.process.exitcode}\n"
            if kind == "result":
                results[rank.index] = value
            else:
                errors[rank.index] = value
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    if errors:
        raise RankError("\n".join(f"--- rank {index}\n{text}" for index, text in errors.items()))
    if pending:
        late = ", ".join(str(rank.index) for rank in pending.values())
        raise RankError(f"rank {late} did not end within {timeout_seconds:.0f} s")
    return [results[rank.index] for rank in ranks]
