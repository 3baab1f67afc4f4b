import gzip
import sys

import pytest

from nvfp4_train.data.error import DataError
from nvfp4_train.data.sources import lines
from nvfp4_train.data.sources.lines import read_lines, read_text
from nvfp4_train.data.sources.record import RecordKind
from tests.support.text_sources import assert_resumes_anywhere, file_source, texts_of, write_jsonl

TEXTS = [f"document {number} " + "words " * (number % 7) for number in range(300)]


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(lines, "_BATCH_BYTES", 1500)


@pytest.mark.parametrize("ending", ["jsonl", "json", "jsonl.gz", "jsonl.zst"])
def test_every_cursor_continues(tmp_path, ending):
    path = write_jsonl(tmp_path / f"a.{ending}", TEXTS)
    whole = assert_resumes_anywhere(file_source(tmp_path, path), lambda: file_source(tmp_path, path))
    assert whole == TEXTS


def test_lines_are_counted_from_one_and_over_batches(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    batches = list(read_lines(path, place="a", column="text", start={}))
    assert len(batches) > 5
    assert batches[0].first == 1
    assert batches[-1].first + len(batches[-1].records) == 301
    assert batches[-1].fraction == 1.0


def test_a_line_may_be_longer_than_a_batch(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["x" * 10_000, "y"])
    assert texts_of(read_lines(path, place="a", column="text", start={})) == ["x" * 10_000, "y"]


def test_last_line_without_its_end(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}')
    assert texts_of(read_lines(tmp_path / "a.jsonl", place="a", column="text", start={})) == ["one", "two"]


@pytest.mark.parametrize("ending", ["jsonl.gz", "jsonl.zst"])
@pytest.mark.parametrize("share", [0.5, 0.98])
def test_truncated_files_are_named(tmp_path, ending, share):
    path = write_jsonl(tmp_path / f"a.{ending}", TEXTS)
    raw = path.read_bytes()
    path.write_bytes(raw[: int(len(raw) * share)])
    with pytest.raises(DataError, match=r"damaged data after \d+ lines") as caught:
        list(read_lines(path, place="the place", column="text", start={}))
    assert caught.value.path == "the place"


@pytest.mark.parametrize("ending", ["jsonl.gz", "jsonl.zst"])
def test_files_that_are_not_what_they_say(tmp_path, ending):
    pytest.importorskip("zstandard")
    (tmp_path / f"a.{ending}").write_text('{"text": "plain"}\n')
    with pytest.raises(DataError, match="damaged data"):
        list(read_lines(tmp_path / f"a.{ending}", place="a", column="text", start={}))


@pytest.mark.parametrize("ending", ["jsonl.gz", "jsonl.zst"])
def test_cursor_beyond_the_end(tmp_path, ending):
    path = write_jsonl(tmp_path / f"a.{ending}", TEXTS)
    with pytest.raises(DataError, match="fewer bytes than were read before"):
        list(read_lines(path, place="a", column="text", start={"offset": 10**6, "record": 400}))


def test_missing_library_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / "a.jsonl.zst").touch()
    with pytest.raises(DataError, match=r"nvfp4-train\[data\]"):
        list(read_lines(tmp_path / "a.jsonl.zst", place="a", column="text", start={}))


def test_text_file_is_one_record(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo")
    (batch,) = read_text(tmp_path / "a.txt", place="a")
    assert (batch.kind, batch.records, batch.cursor) == (RecordKind.file, [b"one\r\ntwo"], {})


def test_gzip_of_several_members(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "one"}\n') + gzip.compress(b'{"text": "two"}\n'))
    assert texts_of(read_lines(tmp_path / "a.jsonl.gz", place="a", column="text", start={})) == ["one", "two"]
