import errno
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from nvfp4_train.checkpoint import save
from nvfp4_train.checkpoint.error import CheckpointError
from nvfp4_train.checkpoint.folder import latest_checkpoint, read_info
from nvfp4_train.checkpoint.load import load_checkpoint
from nvfp4_train.checkpoint.save import save_checkpoint
from nvfp4_train.checkpoint.state import State
from nvfp4_train.parallel.runtime import Runtime
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
ROOT = Path(__file__).parents[2]


def make_state(value: float, *, rows: int = 40) -> State:
    weight = torch.full((rows, 30), value)
    moments = {"exp_avg": torch.full((rows, 30), value / 2), "step": torch.tensor(value)}
    return {"model": {"blocks.0.mixer.weight": weight}, "optimizer": {"blocks.0.mixer.weight": moments}}


def save_at(directory: Path, step: int, *, rows: int = 40) -> Path:
    path = directory / f"step_{step:08d}"
    save_checkpoint(path, make_state(float(step), rows=rows), engine="torch", step=step, metadata={"tokens": step})
    return path


def load_at(path: Path) -> Tensor:
    state = make_state(0.0)
    load_checkpoint(path, state, engine="torch")
    return state["model"]["blocks.0.mixer.weight"]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def fail_with_full_disk(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_checkpoint_is_one_folder_with_its_marker(tmp_path):
    path = save_at(tmp_path / "checkpoints", 5)
    assert names(tmp_path / "checkpoints") == ["step_00000005"]
    assert {"COMPLETE", "metadata.json", ".metadata"} < set(names(path))
    info = read_info(path)
    assert (info.step, info.engine, info.num_ranks, info.metadata) == (5, "torch", 1, {"tokens": 5})


def test_it_can_be_read_without_this_package(tmp_path):
    dcp_to_torch_save(save_at(tmp_path, 5), tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    assert torch.equal(found["model"]["blocks.0.mixer.weight"], torch.full((40, 30), 5.0))
    assert torch.equal(found["optimizer"]["blocks.0.mixer.weight"]["exp_avg"], torch.full((40, 30), 2.5))
    assert found["optimizer"]["blocks.0.mixer.weight"]["step"] == 5


def test_saving_the_same_step_again_replaces_it(tmp_path):
    path = save_at(tmp_path, 5)
    save_checkpoint(path, make_state(9.0), engine="torch", step=5, metadata={})
    assert names(tmp_path) == ["step_00000005"]
    assert torch.equal(load_at(path), torch.full((40, 30), 9.0))


def test_leftovers_of_killed_saves_and_removals_are_cleared(tmp_path):
    for name in (".step_00000003.saving", ".step_00000001.removing"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    save_at(tmp_path, 5)
    assert names(tmp_path) == ["step_00000005"]


def test_a_save_into_the_folder_of_a_run_removes_nothing_but_its_own(tmp_path):
    for name in (".step_00000003.saving", ".step_00000005.saving"):
        (tmp_path / name).mkdir()
    (tmp_path / ".step_notes").write_text("x")
    path = tmp_path / "step_00000005"
    save_checkpoint(path, make_state(5.0), engine="torch", step=5, metadata={}, owns_folder=False)
    assert names(tmp_path) == [".step_00000003.saving", ".step_notes", "step_00000005"]


@pytest.mark.parametrize(
    ("owner", "name"),
    [(dcp.FileSystemWriter, "write_data"), (save, "write_info"), (save, "mark_complete"), (Path, "mkdir")],
    ids=["tensors", "metadata", "marker", "folder"],
)
def test_a_full_disk_is_one_clear_error_and_the_checkpoint_before_stays(tmp_path, monkeypatch, owner, name):
    before = save_at(tmp_path, 5)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail_with_full_disk)
        with pytest.raises(CheckpointError) as caught:
            save_at(tmp_path, 6)
    assert re.fullmatch(
        r".*step_00000006 was not saved \([\d.]+ GiB are free there\)\. On rank 0: OSError: \[Errno 28\] "
        r"No space left on device\. step_00000005 stays usable: the run resumes from it\.",
        str(caught.value),
    )
    assert names(tmp_path) == ["step_00000005"]
    assert latest_checkpoint(tmp_path) == before
    assert torch.equal(load_at(before), torch.full((40, 30), 5.0))
    save_at(tmp_path, 6)  # with space again


def test_a_failed_replacement_leaves_what_was_there(tmp_path, monkeypatch):
    path = save_at(tmp_path, 5)
    monkeypatch.setattr(save, "mark_complete", fail_with_full_disk)
    with pytest.raises(CheckpointError, match="step_00000005 was not saved"):
        save_checkpoint(path, make_state(9.0), engine="torch", step=5, metadata={})
    assert torch.equal(load_at(path), torch.full((40, 30), 5.0))


LIMITED_SAVE = """
import resource, sys
from pathlib import Path
from tests.checkpoint.test_save import save_at
save_at(Path(sys.argv[1]), 5)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
save_at(Path(sys.argv[1]), 6, rows=4000)
"""


def test_a_write_that_the_system_cuts_short(tmp_path):
    """The kernel refuses the bytes in the middle of a tensor; PyTorch's own error for it would be "unexpected pos"."""
    command = [sys.executable, "-W", "ignore", "-c", LIMITED_SAVE, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert "CheckpointError" in done.stderr.splitlines()[-1]
    assert "OSError: [Errno 27] File too large. step_00000005 stays usable" in done.stderr
    assert names(tmp_path) == ["step_00000005"]
    assert torch.equal(load_at(tmp_path / "step_00000005"), torch.full((40, 30), 5.0))


def fill_disk_of_rank_1(runtime: Runtime, directory: Path) -> tuple[str, list[str]]:
    save_at(directory, 5)
    if runtime.rank == 1:
        dcp.FileSystemWriter.write_data = fail_with_full_disk
    try:
        save_at(directory, 6)
    except CheckpointError as error:
        message = str(error)
    else:
        message = "saved"
    runtime.share(None)  # rank 0 has cleaned up when it comes here
    return message, names(directory)


@pytest.mark.distributed
def test_the_full_disk_of_one_rank_is_an_error_on_every_rank(tmp_path):
    for message, left in run_on_ranks(fill_disk_of_rank_1, 2, tmp_path):
        assert "On rank 0, 1: OSError: [Errno 28] No space left on device. step_00000005 stays usable" in message
        assert left == ["step_00000005"]
