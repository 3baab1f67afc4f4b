import json
from pathlib import Path

import pytest

from nvfp4_train.data.write import sync_directory, write_json, write_text


def test_a_text_replaces_the_old_one_and_its_folder_is_made(tmp_path: Path):
    path = tmp_path / "new" / "file"
    write_text(path, "old")
    write_text(path, "ä\n")
    assert path.read_text(encoding="utf-8") == "ä\n"
    assert list(path.parent.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "file"
    write_text(path, "old")

    def full_disk(descriptor: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="no space"):
        write_text(path, "new")
    assert path.read_text() == "old"


def test_what_has_no_json_form_leaves_the_old_file(tmp_path: Path):
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    text = path.read_text()
    assert text.endswith("}\n")
    assert json.loads(text) == {"a": 1}


def test_only_a_directory_that_exists_is_made_durable(tmp_path: Path):
    sync_directory(tmp_path)
    with pytest.raises(FileNotFoundError):
        sync_directory(tmp_path / "missing")
