"""Settings of every test run: few threads, no network, and multi-process tests one after another."""

import os

import pytest

# Before torch is imported, here and in the processes that tests start. Threads that spin while ranks share cores make
# small steps 5 to 10 times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the multi-process tests into one xdist group, so that they do not fight for the same cores."""
    for item in items:
        if item.get_closest_marker("distributed"):
            item.add_marker(pytest.mark.xdist_group("distributed"))
