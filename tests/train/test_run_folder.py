import json
import os
from pathlib import Path

import pytest

from nvfp4_train.train.run_folder import RunFolder


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


def test_one_process_at_a_time_has_the_folder(tmp_path: Path):
    folder = RunFolder(tmp_path / "runs" / "run")
    with folder.lock(), pytest.raises(ValueError, match=rf"in use by process {os.getpid()} on "), folder.lock():
        pass
    with folder.lock():
        assert not folder.is_used


@pytest.mark.parametrize("name", ["file", "file/run", "x" * 300])
def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path, name: str):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"set run\.dir to a folder"), RunFolder(tmp_path / name).lock():
        pass


@pytest.mark.parametrize("text", ["{", "3", "[1]"])
def test_a_damaged_lineage_is_named(tmp_path: Path, text: str):
    (tmp_path / "lineage.json").write_text(text)
    with pytest.raises(ValueError, match=r"lineage.json is damaged"):
        RunFolder(tmp_path).read_lineage()
