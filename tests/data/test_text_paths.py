import os

import pytest

from nvfp4_train.data.error import DataError
from nvfp4_train.data.text_paths import find_text_files


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "texts"
    (root / "deep" / "er").mkdir(parents=True)
    (root / ".hidden").mkdir()
    for name in ("b.txt", "a.md", "deep/er/c.jsonl", "deep/d.jsonl.gz", "e.png", ".hidden/f.txt", ".g.txt", "H.TXT"):
        (root / name).write_text("text")
    return root


def names(folder, *paths):
    return [path.relative_to(folder).as_posix() for path in find_text_files([str(path) for path in paths])]


def test_folder_is_searched_in_a_fixed_order(folder):
    assert names(folder, folder) == ["H.TXT", "a.md", "b.txt", "deep/d.jsonl.gz", "deep/er/c.jsonl"]


def test_globs(folder):
    assert names(folder, folder / "*.txt") == ["b.txt"]
    assert names(folder, folder / "*") == ["H.TXT", "a.md", "b.txt", "deep/d.jsonl.gz", "deep/er/c.jsonl"]
    assert names(folder, folder / "**" / "*.jsonl") == ["deep/er/c.jsonl"]


def test_a_file_named_twice_is_read_once(folder):
    (folder / "link.txt").symlink_to(folder / "b.txt")
    assert names(folder, folder / "b.txt", folder / "*.txt", folder / "deep") == [
        "b.txt",
        "deep/d.jsonl.gz",
        "deep/er/c.jsonl",
    ]


def test_home_and_environment_are_expanded(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("TEXTS", str(folder / "deep"))
    assert names(folder, "~/b.txt", "$TEXTS/er") == ["b.txt", "deep/er/c.jsonl"]


def test_name_with_glob_characters_is_taken_literally_where_it_exists(folder):
    (folder / "x[1].txt").write_text("text")
    assert names(folder, folder / "x[1].txt") == ["x[1].txt"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing.txt", "nothing there"),
        ("*.jsonl", "no text file"),
        ("nothing", "no text file"),
        ("e.png", "a file of type '.png'"),
        ("empty.txt", "an empty file"),
    ],
)
def test_paths_that_give_no_text(folder, name, words):
    (folder / "nothing").mkdir()
    (folder / "empty.txt").touch()
    with pytest.raises(DataError) as caught:
        find_text_files([str(folder / "b.txt"), str(folder / name)])
    assert caught.value.found == words
    assert caught.value.path == str(folder / name)


@pytest.mark.parametrize("given", ["pipe.txt", "*.txt"])
def test_a_named_pipe_or_a_dangling_link_is_no_text(tmp_path, given):
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "link.txt").symlink_to(tmp_path / "gone.txt")
    with pytest.raises(DataError):
        find_text_files([str(tmp_path / given)])
