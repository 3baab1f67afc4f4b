import pytest

from nvfp4_train.checkpoint.folder import mark_complete
from nvfp4_train.checkpoint.retention import prune_checkpoints


def make(directory, *steps, complete=True):
    for step in steps:
        path = directory / f"step_{step:08d}"
        path.mkdir()
        (path / "tensors").write_text("x")
        if complete:
            mark_complete(path)


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_the_newest_ones_stay(tmp_path):
    make(tmp_path, 10, 9, 100)
    gone = prune_checkpoints(tmp_path, keep_last=2)
    assert [path.name for path in gone] == ["step_00000009"]
    assert names(tmp_path) == ["step_00000010", "step_00000100"]


@pytest.mark.parametrize("keep_last", [0, 5])
def test_zero_keeps_all_and_so_does_a_number_above_theirs(tmp_path, keep_last):
    make(tmp_path, 1, 2)
    assert prune_checkpoints(tmp_path, keep_last=keep_last) == []
    assert len(names(tmp_path)) == 2


def test_an_incomplete_folder_neither_counts_nor_goes(tmp_path):
    make(tmp_path, 1, 2)
    make(tmp_path, 3, complete=False)
    prune_checkpoints(tmp_path, keep_last=1)
    assert names(tmp_path) == ["step_00000002", "step_00000003"]


def test_a_removal_that_is_killed_leaves_no_checkpoint_with_a_marker_and_without_tensors(tmp_path, monkeypatch):
    make(tmp_path, 1, 2)

    def killed(path):
        raise KeyboardInterrupt

    monkeypatch.setattr("nvfp4_train.checkpoint.retention.shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        prune_checkpoints(tmp_path, keep_last=1)
    assert names(tmp_path) == [".step_00000001.removing", "step_00000002"]
