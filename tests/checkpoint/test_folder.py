import json
from dataclasses import replace

import pytest

from nvfp4_train.checkpoint.error import CheckpointError
from nvfp4_train.checkpoint.folder import (
    CheckpointInfo,
    complete_checkpoints,
    is_complete,
    latest_checkpoint,
    mark_complete,
    read_info,
    read_metadata,
    write_info,
)

INFO = CheckpointInfo(
    format_version=1,
    engine="torch",
    step=7,
    num_ranks=2,
    torch_version="2.13.0",
    metadata={"tokens": 5, "list": [1, None]},
)


def make(directory, step, *, complete=True):
    path = directory / f"step_{step:08d}"
    path.mkdir()
    write_info(path, INFO)
    if complete:
        mark_complete(path)
    return path


def test_what_was_written_is_read(tmp_path):
    path = make(tmp_path, 7)
    assert read_info(path) == INFO
    assert read_metadata(path) == {"tokens": 5, "list": [1, None]}
    assert json.loads((path / "metadata.json").read_text())["step"] == 7


def test_the_latest_is_the_highest_step_and_not_the_highest_name_or_time(tmp_path):
    paths = [make(tmp_path, step) for step in (100_000_000, 20, 3)]
    assert latest_checkpoint(tmp_path) == paths[0]
    assert complete_checkpoints(tmp_path) == [paths[2], paths[1], paths[0]]


def test_a_folder_without_its_marker_is_ignored_with_a_warning(tmp_path):
    complete, incomplete = make(tmp_path, 1), make(tmp_path, 2, complete=False)
    with pytest.warns(UserWarning, match="step_00000002 is ignored: it has no COMPLETE marker"):
        assert latest_checkpoint(tmp_path) == complete
    assert not is_complete(incomplete)
    with pytest.raises(CheckpointError, match=r"step_00000002 is not a checkpoint .* no COMPLETE marker"):
        read_info(incomplete)


def test_nothing_else_in_the_directory_counts(tmp_path, recwarn):
    for name in (".step_00000009.saving", "step_", "step_7a", "step_²", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_00000003").write_text("a file")
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "missing") is None
    assert not recwarn


def test_a_path_that_does_not_exist_is_said_to(tmp_path):
    with pytest.raises(CheckpointError, match="step_00000001 is not a checkpoint that can be used: it does not exist"):
        read_metadata(tmp_path / "step_00000001")


def test_a_path_that_is_a_file_is_said_to(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"it is not a folder\n    fix: name a folder with the file COMPLETE"):
        read_metadata(tmp_path / "file")


@pytest.mark.parametrize("text", ["", "{garbage", "[]", "{}", '{"format_version": 1}', "\xff"])
def test_damaged_metadata_are_one_clear_error(tmp_path, text):
    path = make(tmp_path, 7)
    (path / "metadata.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"step_00000007/metadata.json could not be read: .*\n    fix: "):
        read_info(path)
    (path / "metadata.json").unlink()
    with pytest.raises(CheckpointError, match=r"metadata.json could not be read: FileNotFoundError"):
        read_info(path)


def test_another_format_version_is_refused(tmp_path):
    path = make(tmp_path, 7)
    write_info(path, replace(INFO, format_version=2))
    with pytest.raises(CheckpointError, match="has format version 2, and this program reads version 1"):
        read_info(path)
