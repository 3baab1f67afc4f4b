import sys

import pytest

from nvfp4_train.data.error import DataError
from nvfp4_train.data.sources import tables
from nvfp4_train.data.sources.record import parse_batch
from nvfp4_train.data.sources.tables import read_parquet
from tests.support.text_sources import assert_resumes_anywhere, file_source, texts_of, write_parquet

TEXTS = [f"document {number}" for number in range(500)]


def read(path, *, column="text", start=None):
    return list(read_parquet(path, place="the place", column=column, start=start or {}))


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(tables, "_BATCH_ROWS", 60)


@pytest.mark.parametrize("group_rows", [7, 100, 1000])
def test_every_cursor_continues(tmp_path, group_rows):
    path = write_parquet(tmp_path / "a.parquet", TEXTS, group_rows=group_rows)
    whole = assert_resumes_anywhere(file_source(tmp_path, path), lambda: file_source(tmp_path, path))
    assert whole == TEXTS


def test_rows_are_counted_from_one(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", TEXTS, group_rows=100)
    batches = read(path)
    assert [batch.first for batch in batches[:3]] == [1, 61, 101]
    assert batches[-1].fraction == 1.0
    # In the middle of a batch, too.
    (first, *_) = read(path, start={"record": 130})
    assert (first.first, first.records[0]) == (131, "document 130")


def test_rows_without_text_are_reported(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", ["one", None, "three"])
    (batch,) = read(path)
    parsed = parse_batch(batch)
    assert parsed.texts == ["one", "three"]
    assert str(parsed.errors[0]).startswith("the place:2: 'text' holds NoneType")


def test_dictionary_and_large_strings(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    for name, array in (
        ("a", pyarrow.array(["x", "y", "x"]).dictionary_encode()),
        ("b", pyarrow.array(["x", "y", "x"], pyarrow.large_string())),
    ):
        parquet.write_table(pyarrow.table({"text": array}), tmp_path / f"{name}.parquet")
        assert texts_of(read(tmp_path / f"{name}.parquet")) == ["x", "y", "x"]


def test_missing_column_and_other_types(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", TEXTS)
    with pytest.raises(DataError, match=r"no column 'body'.*'text', 'id'"):
        read(path, column="body")
    with pytest.raises(DataError, match="'token_count' of type int64"):
        read(path, column="token_count")


def test_damaged_files_are_named(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", TEXTS)
    raw = path.read_bytes()
    for content in (raw[: len(raw) // 2], b"PAR1", b"nonsense"):
        path.write_bytes(content)
        with pytest.raises(DataError, match="no readable parquet data") as caught:
            read(path)
        assert caught.value.path == "the place"


def test_table_without_rows(tmp_path):
    assert read(write_parquet(tmp_path / "a.parquet", [])) == []


def test_missing_library_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"nvfp4-train\[data\]"):
        read(tmp_path / "a.parquet")
