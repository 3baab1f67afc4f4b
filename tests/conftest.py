"""Settings of every test run: few threads, no network, the order, and what happens without a C++ compiler."""

import os
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported, here and in the processes that tests start. Threads that spin while ranks share cores make
# small steps 5 to 10 times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

from tests.support.compiler import HAS_COMPILER

TESTS = Path(__file__).parent
# Folders whose files take longest: they start first, so that no process is left with a long one at the end.
LONG_FOLDERS = ("e2e", "parallel", "engine", "analysis", "scripts")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that take longest first; `make test` hands files out in this order."""
    items.sort(key=_start_order)


def _start_order(item: pytest.Item) -> int:
    folder = item.path.relative_to(TESTS).parts[0]
    return LONG_FOLDERS.index(folder) if folder in LONG_FOLDERS else len(LONG_FOLDERS)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Skip what asks for the compiled kernels where nothing can compile them."""
    yield from _skip_without_compiler()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Skip what asks for the compiled kernels where nothing can compile them."""
    yield from _skip_without_compiler()


def _skip_without_compiler() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if HAS_COMPILER or "no C++ compiler" not in str(error):
            raise
        pytest.skip("the compiled kernels need a C++ compiler")
