import os

import fsspec
import pytest

from nvfp4_train.data.error import DataError
from nvfp4_train.data.sources.files import find_source_files


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "texts"
    (root / "deep").mkdir(parents=True)
    (root / ".hidden").mkdir()
    for name in ("b.jsonl", "a.jsonl.gz", "deep/c.parquet", "d.json.zst", "e.png", ".hidden/f.txt", ".g.txt", "H.TXT"):
        (root / name).write_text("text")
    (root / "empty.txt").touch()
    return root


def names(folder, *inputs):
    return [os.path.relpath(file.name, folder) for file in find_source_files([str(path) for path in inputs])]


def test_folders_globs_and_files_in_a_fixed_order(folder):
    assert names(folder, folder) == ["H.TXT", "a.jsonl.gz", "b.jsonl", "d.json.zst", "deep/c.parquet"]
    assert names(folder, folder / "*.jsonl", folder / "deep", folder / "b.jsonl") == ["b.jsonl", "deep/c.parquet"]
    assert names(folder, folder / "*") == ["H.TXT", "a.jsonl.gz", "b.jsonl", "d.json.zst", "deep/c.parquet"]


def test_version_follows_the_file(folder):
    (before,) = find_source_files([str(folder / "b.jsonl")])
    os.utime(folder / "b.jsonl", ns=(1, 1))
    (after,) = find_source_files([str(folder / "b.jsonl")])
    assert (before.num_bytes, after.num_bytes) == (4, 4)
    assert before.version != after.version


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing.jsonl", "nothing there"),
        ("*.csv", "no file to read"),
        (".hidden", "nothing"),
        ("e.png", "a file of another type"),
        ("empty.txt", "an empty file"),
    ],
)
def test_inputs_that_give_nothing(folder, name, words):
    (folder / ".hidden" / "f.txt").unlink()
    with pytest.raises(DataError) as caught:
        find_source_files([str(folder / name)])
    assert words in caught.value.found or caught.value.found == "no file to read"
    assert caught.value.path == str(folder / name)


def test_object_stores():
    system = fsspec.filesystem("memory")
    system.store.clear()
    for name in ("b.jsonl", "deep/c.parquet", "e.png"):
        system.pipe_file(f"/texts/{name}", b"text")
    system.pipe_file("/texts/empty.jsonl", b"")

    def uris(given):
        return [file.name for file in find_source_files([given])]

    assert uris("memory://texts") == ["memory:///texts/b.jsonl", "memory:///texts/deep/c.parquet"]
    assert uris("memory://texts/*.jsonl") == ["memory:///texts/b.jsonl"]
    (file,) = find_source_files(["memory://texts/b.jsonl"])
    assert file.num_bytes == 4
    for given, words in (
        ("memory://texts/x.jsonl", "nothing there"),
        ("memory://texts/e.png", "another type"),
        ("memory://texts/empty.jsonl", "an empty file"),
        ("memory://texts/*.txt", "no file to read"),
    ):
        with pytest.raises(DataError, match=words):
            find_source_files([given])
    system.store.clear()
