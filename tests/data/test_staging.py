import json
import multiprocessing
import os

import fsspec
import pytest

from nvfp4_train.data import staging as module
from nvfp4_train.data.error import DataError
from nvfp4_train.data.indexed import IndexedTokens
from nvfp4_train.data.manifest import file_digest
from nvfp4_train.data.merge import merge_pairs
from nvfp4_train.data.staging import Staging, is_uri
from tests.support.token_files import write_pair


@pytest.fixture
def memory():
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    yield system
    system.store.clear()


def put(memory, name, content):
    memory.pipe_file(f"/data/{name}", content)
    return f"memory://data/{name}"


def copies(folder):
    return sorted(path.name for path in folder.glob("*/*") if not path.name.endswith((".lock", ".details")))


def test_local_paths_are_left_where_they_are(tmp_path):
    with Staging(tmp_path / "cache", max_bytes=0) as staging:
        assert staging.file("/a/b.bin").as_posix() == "/a/b.bin"
        assert staging.file("file:///a/b.bin").as_posix() == "/a/b.bin"
        assert staging.pair("rel/pair").as_posix() == "rel/pair"
    assert not is_uri("file:///a")
    assert is_uri("s3://a/b")
    assert not (tmp_path / "cache").exists()


def test_file_is_copied_once(tmp_path, memory, monkeypatch):
    uri = put(memory, "a.bin", b"content")
    with Staging(tmp_path, max_bytes=100) as staging:
        path = staging.file(uri)
        assert path.read_bytes() == b"content"
    monkeypatch.setattr(module, "_download", None)
    with Staging(tmp_path, max_bytes=100) as staging:
        assert staging.file(uri) == path


def test_local_file_system_of_fsspec(tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "a.bin").write_bytes(b"content")
    with Staging(tmp_path / "cache", max_bytes=100) as staging:
        path = staging.file(f"local://{tmp_path}/store/a.bin")
        assert path.read_bytes() == b"content"
        assert tmp_path / "cache" in path.parents


def test_pair_with_checksums_of_its_manifest(tmp_path, memory):
    write_pair(tmp_path / "source", [[1, 2], [3]])
    merge_pairs([tmp_path / "source"], tmp_path / "pair")
    for ending in (".bin", ".idx", ".manifest.json"):
        put(memory, f"pair{ending}", (tmp_path / f"pair{ending}").read_bytes())
    with Staging(tmp_path / "cache", max_bytes=1000) as staging:
        pair = IndexedTokens(staging.pair("memory://data/pair"))
        assert [document.tolist() for document in pair.documents()] == [[1, 2], [3]]
    put(memory, "pair.bin", b"\0" * 6)
    with Staging(tmp_path / "other", max_bytes=1000) as staging, pytest.raises(DataError, match="a wrong checksum"):
        staging.pair("memory://data/pair")
    assert "pair.bin" not in copies(tmp_path / "other")


def test_checksums_of_a_set_of_shards(tmp_path, memory):
    write_pair(tmp_path / "set_00000", [[1, 2], [3]])
    merge_pairs([tmp_path / "set_00000"], tmp_path / "set")
    text = (tmp_path / "set.manifest.json").read_text().replace('"name": "set"', '"name": "set_00000"')
    put(memory, "set.manifest.json", text.encode())
    put(memory, "set_00000.idx", (tmp_path / "set_00000.idx").read_bytes())
    put(memory, "set_00000.bin", b"\0" * 6)
    with Staging(tmp_path / "cache", max_bytes=1000) as staging, pytest.raises(DataError, match="a wrong checksum"):
        staging.pair("memory://data/set_00000")


def test_damaged_manifest_is_named(tmp_path, memory):
    put(memory, "pair.manifest.json", b"{")
    with Staging(tmp_path, max_bytes=1000) as staging, pytest.raises(DataError, match="no readable manifest"):
        staging.pair("memory://data/pair")


def test_given_checksum(tmp_path, memory):
    uri = put(memory, "a.bin", b"content")
    (tmp_path / "right").write_bytes(b"content")
    with Staging(tmp_path / "cache", max_bytes=100) as staging:
        assert staging.file(uri, digest=file_digest(tmp_path / "right")).is_file()
        with pytest.raises(DataError, match="a wrong checksum, 3 times"):
            staging.file(uri, digest="0" * 32)


def test_room_comes_from_what_was_not_used_for_longest(tmp_path, memory):
    uris = [put(memory, f"{name}.bin", bytes(40)) for name in "abc"]
    for uri in uris[:2]:
        with Staging(tmp_path, max_bytes=100) as staging:
            staging.file(uri)
    with Staging(tmp_path, max_bytes=100) as staging:
        staging.file(uris[0])  # so that b is the oldest
    with Staging(tmp_path, max_bytes=100) as staging:
        staging.file(uris[2])
    assert copies(tmp_path) == ["a.bin", "c.bin"]


def test_files_in_use_stay_and_too_many_are_refused(tmp_path, memory):
    uris = [put(memory, f"{name}.bin", bytes(40)) for name in "abc"]
    with Staging(tmp_path, max_bytes=100) as one, Staging(tmp_path, max_bytes=100) as two:
        one.file(uris[0])
        one.file(uris[1])
        with pytest.raises(DataError, match="are taken by files in use"):
            two.file(uris[2])
        assert copies(tmp_path) == ["a.bin", "b.bin"]
        one.release(one.file(uris[0]))
        assert two.file(uris[2]).is_file()
        assert copies(tmp_path) == ["b.bin", "c.bin"]


def test_file_larger_than_the_bound(tmp_path, memory):
    with Staging(tmp_path, max_bytes=5) as staging, pytest.raises(DataError, match="allow more bytes"):
        staging.file(put(memory, "a.bin", bytes(6)))


def test_changed_file_is_copied_again(tmp_path, memory):
    uri = put(memory, "a.bin", b"old")
    with Staging(tmp_path, max_bytes=100) as staging:
        staging.file(uri)
    put(memory, "a.bin", b"new")
    with Staging(tmp_path, max_bytes=100) as staging:
        assert staging.file(uri).read_bytes() == b"new"


def test_damaged_copy_is_replaced(tmp_path, memory):
    uri = put(memory, "a.bin", b"right")
    with Staging(tmp_path, max_bytes=100) as staging:
        staging.file(uri).write_bytes(b"wrong")
    with Staging(tmp_path, max_bytes=100) as staging:
        path = staging.file(uri)
        assert path.read_bytes() == b"right"
    details = json.loads(path.with_name("a.bin.details").read_text())
    assert details["digest"] == file_digest(path)


def test_what_a_killed_download_left_is_removed(tmp_path, memory):
    uri = put(memory, "a.bin", b"content")
    with Staging(tmp_path, max_bytes=100) as staging:
        folder = staging.file(uri).parent
    (folder / "b.bin.partial").write_bytes(bytes(1000))
    with Staging(tmp_path, max_bytes=100) as staging:
        staging.file(put(memory, "c.bin", b"content"))
    assert copies(tmp_path) == ["a.bin", "c.bin"]


def test_interrupted_reads_are_tried_again(tmp_path, memory, monkeypatch):
    uri = put(memory, "a.bin", b"content")
    copy, calls = module.shutil.copyfileobj, []

    def failing_once(source, target, length):
        calls.append(1)
        if len(calls) == 1:
            target.write(b"con")
            raise ConnectionResetError("reset")
        copy(source, target, length)

    monkeypatch.setattr(module.shutil, "copyfileobj", failing_once)
    with Staging(tmp_path, max_bytes=100) as staging:
        assert staging.file(uri).read_bytes() == b"content"
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("uri", "words"), [("memory://data/missing.bin", "check the path"), ("nosuch://data/a.bin", "a protocol that")]
)
def test_what_cannot_be_read_is_named(tmp_path, memory, uri, words):
    with Staging(tmp_path, max_bytes=100) as staging, pytest.raises(DataError, match=words) as caught:
        staging.file(uri)
    assert caught.value.path == uri


def stage(store, cache, results):
    with Staging(cache, max_bytes=100) as staging:
        path = staging.file(f"local://{store}/a.bin")
        results.put((path.read_bytes(), os.stat(path).st_ino))


def test_processes_share_one_copy(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"content")
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    processes = [context.Process(target=stage, args=(tmp_path, tmp_path / "cache", results)) for _ in range(4)]
    for process in processes:
        process.start()
    found = {results.get() for _ in processes}
    for process in processes:
        process.join()
    assert len(found) == 1
    assert next(iter(found))[0] == b"content"
