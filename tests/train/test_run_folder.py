import json
from pathlib import Path

import pytest

from nvfp4_train.train.run_folder import RunFolder, write_text


def test_a_folder_is_used_once_something_is_in_it(tmp_path: Path):
    folder = RunFolder(tmp_path / "run")
    assert not folder.is_used
    folder.path.mkdir()
    assert not folder.is_used
    folder.write_text("config.yaml", "a: 1\n")
    assert folder.is_used


def test_json_files_end_with_a_line_break(tmp_path: Path):
    RunFolder(tmp_path).write_json("model.json", {"num_parameters": 3})
    text = (tmp_path / "model.json").read_text()
    assert text.endswith("}\n")
    assert json.loads(text) == {"num_parameters": 3}


def test_lineage_is_read_back_and_taken_away(tmp_path: Path):
    folder = RunFolder(tmp_path)
    assert folder.read_lineage() is None
    folder.write_lineage({"step": 3})
    assert folder.read_lineage() == {"step": 3}
    folder.write_lineage(None)
    assert folder.read_lineage() is None


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "file"
    write_text(path, "old")

    def full_disk(descriptor: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="no space"):
        write_text(path, "new")
    assert path.read_text() == "old"
