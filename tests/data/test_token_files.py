import json
import shutil
import uuid

import fsspec
import pytest

from nvfp4_train.data.error import DataError
from nvfp4_train.data.indexed import IndexedTokens
from nvfp4_train.data.staging import Staging
from nvfp4_train.data.token_files import find_pairs
from tests.support.token_files import write_pair


@pytest.fixture
def staging(tmp_path):
    with Staging(tmp_path / "staged", max_bytes=1 << 20) as staging:
        yield staging


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "data"
    (folder / "deeper").mkdir(parents=True)
    for name in ("b", "a", "deeper/c"):
        write_pair(folder / name, [[1, 2], [3]])
    return folder


def find(staging, *paths, vocab_size=100):
    return find_pairs([str(path) for path in paths], staging=staging, vocab_size=vocab_size)


def test_pairs_folders_and_globs(staging, folder):
    a, b, c = folder / "a", folder / "b", folder / "deeper" / "c"
    assert find(staging, b, a) == [b, a]
    assert find(staging, folder / "a.bin", folder / "b.idx") == [a, b]
    assert find(staging, folder) == [a, b, c]
    assert find(staging, folder / "*") == [a, b]
    assert find(staging, folder / "d*") == [c]
    assert find(staging, b, folder) == [b, a, c]  # each once
    assert find(staging, f"file://{a}") == [a]


@pytest.mark.parametrize("name", ["missing", "missing*", "deeper/nothing"])
def test_a_path_that_names_nothing_is_refused(staging, folder, name):
    with pytest.raises(DataError, match=r"found:    no \.bin/\.idx pair"):
        find(staging, folder / name)


def manifest(folder, name, shards, *, vocab_size):
    values = {
        "num_documents": 2, "num_tokens": 3, "num_empty": 0, "num_errors": 0, "errors": [], "dtype": "uint16",
        "tokenizer": {"name": "tok.json", "digest": "d", "vocab_size": vocab_size, "end_of_document": None},
        "text_digest": "", "job": "", "sources": [], "versions": {},
        "shards": [
            {"name": shard, "num_documents": 2, "num_tokens": 3, "bin_digest": "", "idx_digest": ""} for shard in shards
        ],
    }  # fmt: skip
    (folder / f"{name}.manifest.json").write_text(json.dumps(values))


def test_a_manifest_names_its_shards_in_order(staging, folder):
    manifest(folder, "all", ["b", "a"], vocab_size=100)
    assert find(staging, folder / "all") == [folder / "b", folder / "a"]


def test_a_tokenizer_larger_than_the_model_is_refused(staging, folder):
    manifest(folder, "a", ["a"], vocab_size=101)
    with pytest.raises(DataError, match=r"tok\.json, which has 101 entries\n.*model\.vocab_size \(100\)"):
        find(staging, folder / "a")
    assert find(staging, folder / "a", vocab_size=101) == [folder / "a"]


@pytest.fixture
def bucket(folder):
    """The same files in fsspec's memory file system."""
    system, root = fsspec.filesystem("memory"), f"/{uuid.uuid4().hex}"
    for path in sorted(folder.iterdir()):
        if path.is_file():
            system.pipe_file(f"{root}/{path.name}", path.read_bytes())
    yield f"memory:/{root}"
    system.rm(root, recursive=True)


@pytest.mark.parametrize("path", ["/a", "/a.idx", "/a*"])
def test_remote_pairs_are_staged(staging, folder, bucket, path):
    (prefix,) = find(staging, bucket + path)
    assert prefix.is_relative_to(folder.parent / "staged")
    assert IndexedTokens(prefix).tokens.tolist() == [1, 2, 3]


@pytest.mark.parametrize("path", ["", "/*", "/all"])
def test_remote_folders_globs_and_manifests(staging, folder, bucket, path):
    manifest(folder, "all", ["a", "b"], vocab_size=100)
    system = fsspec.filesystem("memory")
    content = json.loads((folder / "all.manifest.json").read_text())
    system.pipe_file(f"{bucket.removeprefix('memory:/')}/all.manifest.json", json.dumps(content).encode())
    assert [prefix.name for prefix in find(staging, bucket + path)] == ["a", "b"]


def test_a_remote_path_that_names_nothing_is_refused(staging, bucket):
    with pytest.raises(DataError, match=r"no \.bin/\.idx pair"):
        find(staging, f"{bucket}/missing")


def test_staged_files_outlive_their_source(staging, folder, bucket):
    (prefix,) = find(staging, f"{bucket}/a")
    shutil.rmtree(folder)
    assert IndexedTokens(prefix).num_tokens == 3
