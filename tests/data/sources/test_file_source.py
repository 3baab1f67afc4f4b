import fsspec
import pytest

from nvfp4_train.data.manifest import file_digest
from nvfp4_train.data.sources import lines
from nvfp4_train.data.sources.file_source import FileSource
from nvfp4_train.data.sources.files import find_source_files
from nvfp4_train.data.staging import Staging
from tests.support.text_sources import (
    assert_resumes_anywhere,
    file_source,
    texts_of,
    write_jsonl,
    write_parquet,
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "_BATCH_BYTES", 300)
    root = tmp_path / "texts"
    root.mkdir()
    write_jsonl(root / "a.jsonl", [f"a{number}" for number in range(30)])
    (root / "b.txt").write_text("b")
    write_jsonl(root / "c.jsonl.gz", [f"c{number}" for number in range(30)])
    write_parquet(root / "d.parquet", [f"d{number}" for number in range(5)], group_rows=2)
    (root / "e.md").write_text("e")
    return root


def test_files_of_every_kind_and_every_cursor(tmp_path, folder):
    whole = assert_resumes_anywhere(file_source(tmp_path, folder), lambda: file_source(tmp_path, folder))
    assert (len(whole), whole[0], whole[30], whole[31], whole[61], whole[-1]) == (67, "a0", "b", "c0", "d0", "e")


def test_fractions_rise_to_one(tmp_path, folder):
    fractions = [batch.fraction for batch in file_source(tmp_path, folder).batches(None)]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0


def test_description_holds_what_was_read(tmp_path, folder):
    source = file_source(tmp_path, folder)
    batches = list(source.batches(None))
    names = [path.name for path in sorted(folder.iterdir())]
    for described in (source, file_source(tmp_path, folder)):  # with hashes at hand, and without
        records = described.describe(batches[-1].cursor)
        assert [record.digest for record in records] == [file_digest(folder / name) for name in names]
    assert len(file_source(tmp_path, folder).describe(batches[0].cursor)) == 1


def test_identity_follows_files_and_column(tmp_path, folder):
    before = file_source(tmp_path, folder).identity
    assert file_source(tmp_path, folder).identity == before
    assert file_source(tmp_path, folder, column="body").identity != before
    (folder / "b.txt").write_text("bb")
    assert file_source(tmp_path, folder).identity != before


def test_remote_files_are_staged_one_by_one(tmp_path, folder):
    system = fsspec.filesystem("memory")
    system.store.clear()
    for path in folder.iterdir():
        system.pipe_file(f"/texts/{path.name}", path.read_bytes())
    largest = max(path.stat().st_size for path in folder.iterdir())
    with Staging(tmp_path / "cache", max_bytes=largest) as staging:
        source = FileSource(find_source_files(["memory://texts"]), column="text", staging=staging)
        remote = texts_of(source.batches(None))
        local = texts_of(file_source(tmp_path, folder).batches(None))
        assert remote == local
        records = source.describe({"file": 5, "within": {}})
        assert [record.digest for record in records] == [file_digest(path) for path in sorted(folder.iterdir())]
    system.store.clear()
