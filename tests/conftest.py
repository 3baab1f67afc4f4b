"""Settings of every test run: few threads, no network, and what happens on a machine without a C++ compiler."""

import os
from collections.abc import Iterator

# Before torch is imported, here and in the processes that tests start. Threads that spin while ranks share cores make
# small steps 5 to 10 times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

from tests.support.compiler import HAS_COMPILER


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
