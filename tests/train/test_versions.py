import subprocess
from pathlib import Path

import pytest
import torch

from nvfp4_train.train.versions import collect_versions, git_revision


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet")
    (tmp_path / "file").write_text("1")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    return tmp_path


def test_versions_name_what_ran():
    versions = collect_versions()
    assert versions["torch"] == torch.__version__
    assert versions["num_threads"] == torch.get_num_threads()
    assert {"nvfp4_train", "git_revision", "python", "numpy", "machine"} <= set(versions)


def test_the_revision_is_the_commit(repository: Path):
    assert git_revision(repository) == git(repository, "rev-parse", "HEAD")


def test_changed_files_are_told(repository: Path):
    (repository / "file").write_text("2")
    assert git_revision(repository) == git(repository, "rev-parse", "HEAD") + "-dirty"


def test_outside_a_repository_there_is_no_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_revision(tmp_path) is None


def test_without_git_there_is_no_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_revision(tmp_path) is None
