"""Where whole runs go."""

from pathlib import Path

import pytest

from tests.support.runs import RunDirs


@pytest.fixture(scope="session")
def data_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared data, made once a session."""
    return tmp_path_factory.mktemp("data_cache")


@pytest.fixture(scope="module")
def module_dirs(tmp_path_factory: pytest.TempPathFactory, data_cache: Path) -> RunDirs:
    """For runs that several tests of a module look at and none changes."""
    return RunDirs(tmp_path_factory.mktemp("runs"), cache=data_cache)


@pytest.fixture
def dirs(tmp_path: Path, data_cache: Path) -> RunDirs:
    """For the runs of one test."""
    return RunDirs(tmp_path / "runs", cache=data_cache)
