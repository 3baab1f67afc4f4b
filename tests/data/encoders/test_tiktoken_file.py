import inspect
import sys

import pytest

from nvfp4_train.data.encoders import tiktoken_file
from nvfp4_train.data.encoders.tiktoken_file import TiktokenEncoder
from nvfp4_train.data.error import DataError
from tests.support.tokenizer_files import write_tiktoken

PATTERN = r"\S+|\s+"


def write_ranks(path, count):
    extra = tuple(number.to_bytes(4, "big") for number in range(count - 256))
    return write_tiktoken(path, words=extra)


def test_own_file_with_a_pattern(tmp_path):
    encoder = TiktokenEncoder(write_tiktoken(tmp_path / "a.tiktoken"), name="a", pattern=PATTERN)
    assert encoder.encode(["some"])[0].tolist() == [258]
    assert (encoder.end_of_document, encoder.vocab_size) == (259, 260)
    assert encoder.special_id("<|endoftext|>") == 259
    assert encoder.decode([258, 259]) == "some<|endoftext|>"


def test_own_file_needs_a_pattern(tmp_path):
    path = write_tiktoken(tmp_path / "a.tiktoken")
    with pytest.raises(DataError, match="259 ranks"):
        TiktokenEncoder(path, name="a")
    with pytest.raises(DataError, match="a valid pattern"):
        TiktokenEncoder(path, name="a", pattern="(")


def test_pattern_is_part_of_the_digest(tmp_path):
    path = write_tiktoken(tmp_path / "a.tiktoken")
    digests = {TiktokenEncoder(path, name="a", pattern=pattern).digest for pattern in (PATTERN, r"\w+|\W+")}
    assert len(digests) == 2


@pytest.mark.parametrize(("count", "end", "size"), [(50256, 50256, 50257), (100256, 100257, 100277)])
def test_published_encodings_are_recognized(tmp_path, count, end, size):
    encoder = TiktokenEncoder(write_ranks(tmp_path / "a.tiktoken", count), name="a")
    assert (encoder.end_of_document, encoder.vocab_size) == (end, size)
    words = encoder.encode(["It's 12345 words"])[0]
    assert encoder.decode(words.tolist()) == "It's 12345 words"


@pytest.mark.peer
def test_patterns_are_those_of_the_library():
    openai_public = pytest.importorskip("tiktoken_ext.openai_public")
    assert openai_public.r50k_pat_str == tiktoken_file._GPT2
    source = inspect.getsource(openai_public)
    assert tiktoken_file._CL100K in source
    assert all(part in source for part in tiktoken_file._O200K.split("|")[:2])
    for count, name in ((100256, "cl100k_base"), (199998, "o200k_base")):
        known = tiktoken_file._PUBLISHED[count]
        assert str(known.end_id) in inspect.getsource(getattr(openai_public, name))


@pytest.mark.parametrize(
    ("content", "words"), [("!!! 1\n", "1"), ("YQ== x\n", "x"), ("YQ==\n", "YQ=="), ("YQ== 0\n", "without byte 0")]
)
def test_damaged_files(tmp_path, content, words):
    (tmp_path / "a.tiktoken").write_text(content)
    with pytest.raises(DataError, match=words):
        TiktokenEncoder(tmp_path / "a.tiktoken", name="a", pattern=PATTERN)


def test_missing_library_is_named(tmp_path, monkeypatch):
    path = write_tiktoken(tmp_path / "a.tiktoken")
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(DataError, match=r"nvfp4-train\[data\]"):
        TiktokenEncoder(path, name="a", pattern=PATTERN)
