import hashlib

import pytest

from nvfp4_train.data.sources.record import RecordBatch, RecordError, RecordKind, parse_batch

HUGE = "[" * 100_000


def batch(*records, kind=RecordKind.line, first=1):
    return RecordBatch(
        place="a.jsonl", kind=kind, column="text", first=first, records=list(records), cursor={}, fraction=None
    )


def test_lines():
    parsed = parse_batch(
        batch(b'{"text": "one", "other": 1}\n', b"\n", b'{"text": ""}', b'\xef\xbb\xbf{"text": "two"}')
    )
    assert parsed.texts == ["one", "two"]
    assert parsed.digests == [hashlib.blake2b(text.encode(), digest_size=16).digest() for text in parsed.texts]
    assert parsed.num_empty == 1  # a blank line is no record
    assert parsed.errors == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"text": "unfinished', "invalid JSON (Unterminated string"),
        (b"[1, 2]", "a JSON list"),
        (b'{"body": "x"}', "no column 'text', but ['body']"),
        (b'{"text": 3}', "'text' holds int"),
        (b'{"text": null}', "'text' holds NoneType"),
        (b'{"text": "\xff"}', "not UTF-8 at byte 10"),
        (HUGE.encode(), "JSON"),
        (b'{"n": ' + b"9" * 5000 + b', "text": "x"}', "invalid JSON"),
    ],
)
def test_bad_lines_are_counted_by_their_number_and_the_rest_is_kept(line, words):
    parsed = parse_batch(batch(b'{"text": "good"}', b"", line, b'{"text": "after"}', first=101))
    assert parsed.texts == ["good", "after"]
    (error,) = parsed.errors
    assert error.place == "a.jsonl:103"
    assert words in error.found


def test_lone_surrogates_become_question_marks():
    parsed = parse_batch(batch(b'{"text": "lone \\ud800, pair \\ud83d\\ude00"}'))
    assert parsed.texts == ["lone ?, pair \N{GRINNING FACE}"]


def test_values():
    parsed = parse_batch(batch("one", None, "", 5, kind=RecordKind.value, first=11))
    assert parsed.texts == ["one"]
    assert parsed.num_empty == 1
    assert [error.place for error in parsed.errors] == ["a.jsonl:12", "a.jsonl:14"]


def test_files():
    assert parse_batch(batch(b"\xef\xbb\xbfone\ntwo\n", kind=RecordKind.file)).texts == ["one\ntwo\n"]
    (error,) = parse_batch(batch(b"ab\xff", kind=RecordKind.file)).errors
    assert (error.place, error.found) == ("a.jsonl", "bytes that are not UTF-8 at byte 2")


def test_error_is_one_line():
    assert str(RecordError(place="a:1", found="x", expected="y")) == "a:1: x, expected y"
