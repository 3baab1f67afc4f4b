import gzip
import json
import re
from pydoc_data.topics import topics

import pytest

from nvfp4_train.config.data import PythonStdlibDataConfig
from nvfp4_train.data import corpus
from nvfp4_train.data.corpus import FileKind, corpus_files, corpus_fingerprint, read_documents
from nvfp4_train.data.error import DataError
from tests.support.token_files import GOLDEN_TEXT, text_config


def texts(tmp_path, *paths, **changes):
    return [document.text for document in read_documents(corpus_files(text_config(tmp_path, *paths, **changes)))]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_text_file_is_one_document_and_jsonl_one_a_line(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "b.md").write_text("# three")
    write_jsonl(tmp_path / "c.jsonl", [{"text": "four", "other": 1}, {"text": "five\nsix"}])
    with gzip.open(tmp_path / "d.jsonl.gz", "wt") as file:
        file.write('{"text": "seven"}\n\n{"text": "eight"}')
    assert texts(tmp_path, tmp_path) == ["one\ntwo\n", "# three", "four", "five\nsix", "seven", "eight"]


def test_jsonl_key_chooses_the_text(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "no", "body": "yes"}])
    assert texts(tmp_path, path, jsonl_key="body") == ["yes"]


def test_empty_documents_are_left_out(tmp_path):
    (tmp_path / "a.txt").touch()
    (tmp_path / "b.txt").write_text("b")
    write_jsonl(tmp_path / "c.jsonl", [{"text": ""}, {"text": "c"}])
    assert texts(tmp_path, tmp_path) == ["b", "c"]


def test_bytes_that_are_not_text_are_replaced_the_same_way_each_time(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfna\xefve \xff")
    (tmp_path / "b.jsonl").write_text('{"text": "lone \\ud800 surrogate, pair \\ud83d\\ude00"}')
    assert texts(tmp_path, tmp_path) == ["na\ufffdve \ufffd", "lone ? surrogate, pair \N{GRINNING FACE}"]


def test_digest_depends_on_the_text_only(tmp_path):
    (tmp_path / "a.txt").write_text("same")
    write_jsonl(tmp_path / "b.jsonl", [{"text": "same"}, {"text": "other"}])
    first, second, third = read_documents(corpus_files(text_config(tmp_path, tmp_path)))
    assert first.digest == second.digest != third.digest


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": "unfinished', "invalid JSON"),
        pytest.param("[" * 100_000, "invalid JSON", id="nested too deep"),
        pytest.param('{"text": "a", "id": ' + "1" * 5000 + "}", "invalid JSON", id="number too long"),
        ("[1, 2]", "a JSON list"),
        ('{"body": "x"}', "the key 'text'"),
        ('{"text": 3}', "'text' holds int"),
    ],
)
def test_bad_jsonl_line_is_named_by_its_number(tmp_path, line, words):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n\n' + line + "\n")
    with pytest.raises(DataError, match=re.escape(words)) as caught:
        texts(tmp_path, path)
    assert caught.value.path == f"{path}:3"


def test_truncated_gzip_is_named(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    whole = gzip.compress(b'{"text": "some words"}\n' * 1000)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="damaged gzip data") as caught:
        texts(tmp_path, path)
    assert caught.value.path == str(path)


def test_gzip_that_is_not_gzip_is_named(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_text('{"text": "plain"}\n')
    with pytest.raises(DataError, match="damaged gzip data"):
        texts(tmp_path, path)


def test_fingerprint_follows_content_and_key_but_not_place(tmp_path):
    def fingerprint(folder, **changes):
        return corpus_fingerprint(corpus_files(text_config(tmp_path, folder, **changes)))

    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_jsonl(tmp_path / name / f"{name}.jsonl", [{"text": "same"}])
    before = fingerprint(tmp_path / "one")
    assert fingerprint(tmp_path / "two") == before
    assert fingerprint(tmp_path / "one", jsonl_key="other") != before
    write_jsonl(tmp_path / "one" / "one.jsonl", [{"text": "Same"}])
    assert fingerprint(tmp_path / "one") != before


@pytest.fixture
def stdlib_config(tmp_path):
    return PythonStdlibDataConfig(
        cache_dir=str(tmp_path), validation_fraction=0.1, tokenizer_vocab_size=300, prefetch=0
    )


def test_standard_library_files_are_sources_in_a_fixed_order(stdlib_config):
    files = corpus_files(stdlib_config)
    assert files == corpus_files(stdlib_config)
    paths = [file.path for file in files]
    assert {"json", "email"} <= {path.parent.name for path in paths}
    assert all(path.suffix == ".py" for path in paths)
    assert not {"site-packages", "dist-packages", "__pycache__"} & {part for path in paths for part in path.parts}
    assert [file.path.name for file in files if file.kind is FileKind.topics] == ["topics.py"]


def test_topics_are_read_as_text(stdlib_config):
    (file,) = [file for file in corpus_files(stdlib_config) if file.kind is FileKind.topics]
    read = [document.text for document in read_documents([file])]
    assert read == [topics[name] for name in sorted(topics)]


def test_installed_packages_do_not_belong_to_the_library(tmp_path, monkeypatch, stdlib_config):
    for name in ("b.py", "a/c.py", "site-packages/d.py", "dist-packages/e.py", "a/__pycache__/f.py", "g.txt"):
        path = tmp_path / "lib" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("pass")
    monkeypatch.setattr(corpus.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "lib")})
    files = corpus_files(stdlib_config)
    assert [file.path.relative_to(tmp_path / "lib").as_posix() for file in files] == ["b.py", "a/c.py"]


def test_python_without_sources_is_refused(tmp_path, monkeypatch, stdlib_config):
    monkeypatch.setattr(corpus.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "lib")})
    with pytest.raises(DataError, match=r"no \.py files"):
        corpus_files(stdlib_config)


def test_golden_text_is_readable(tmp_path):
    read = texts(tmp_path, GOLDEN_TEXT)
    assert len(read) == 56
    assert sum(map(len, read)) > 100_000
