"""Records on their way from a source to the tokenizer: read in bulk by one process, parsed by any of many."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from nvfp4_train.data.manifest import SourceRecord

Cursor = dict[str, Any]  # where a source goes on reading; JSON values, known to that source only


class RecordKind(StrEnum):
    """What a record of a batch is."""

    line = "line"  # bytes: a JSON object
    file = "file"  # bytes: the whole text
    value = "value"  # a value of the text column


@dataclass(frozen=True, kw_only=True)
class RecordBatch:
    """Some records in a row.

    Args:
        place: Path, URI or name of what they are from.
        kind: What a record is.
        column: Key of a JSON object that holds the text.
        first: Number of the first record, counted from 1; a line number for lines.
        records: The records.
        cursor: Where reading goes on after them.
        fraction: Share of the whole source that has been read after them; None where that is not known.
    """

    place: str
    kind: RecordKind
    column: str
    first: int
    records: list[Any]
    cursor: Cursor
    fraction: float | None


@dataclass(frozen=True, kw_only=True)
class RecordError:
    """A record that cannot be used.

    Args:
        place: Path and number of the record.
        found: What is there.
        expected: What should be there.
    """

    place: str
    found: str
    expected: str

    def __str__(self) -> str:
        return f"{self.place}: {self.found}, expected {self.expected}"


@dataclass(frozen=True, kw_only=True)
class ParsedBatch:
    """The texts of a batch.

    Args:
        texts: Texts that are not empty.
        digests: Their hashes, 16 bytes each.
        num_empty: Records without text: blank lines apart.
        errors: Records that cannot be used.
    """

    texts: list[str]
    digests: list[bytes]
    num_empty: int
    errors: list[RecordError]


class Source(Protocol):
    """Records in a fixed order.

    Attributes:
        identity: JSON values that are equal exactly where two sources give the same records, as far as that can be
            told without reading them.
    """

    identity: list[dict[str, Any]]

    def batches(self, cursor: Cursor | None) -> Iterator[RecordBatch]:
        """Yield all records, or those from ``cursor`` on; where batches end is up to the source.

        Raises:
            DataError: The source cannot be read.
        """
        ...

    def describe(self, cursor: Cursor) -> list[SourceRecord]:
        """Return name and hash of everything that was read up to ``cursor``."""
        ...


def parse_batch(batch: RecordBatch) -> ParsedBatch:
    """Return the texts of a batch, and what is wrong with the rest."""
    texts: list[str] = []
    errors: list[RecordError] = []
    num_empty = 0
    for number, record in enumerate(batch.records, start=batch.first):
        if batch.kind is RecordKind.line and not record.strip():
            continue
        parsed = _parse(record, batch.kind, batch.column)
        if isinstance(parsed, str):
            if parsed:
                texts.append(parsed)
            else:
                num_empty += 1
        else:
            place = batch.place if batch.kind is RecordKind.file else f"{batch.place}:{number}"
            errors.append(RecordError(place=place, found=parsed[0], expected=parsed[1]))
    digests = [hashlib.blake2b(text.encode(), digest_size=16).digest() for text in texts]
    return ParsedBatch(texts=texts, digests=digests, num_empty=num_empty, errors=errors)


def _parse(record: Any, kind: RecordKind, column: str) -> str | tuple[str, str]:
    """Return the text of a record, or what was found and what was expected."""
    match kind:
        case RecordKind.line:
            return _parse_line(record, column)
        case RecordKind.file:
            try:
                return str(record.decode("utf-8-sig"))
            except UnicodeDecodeError as error:
                return f"bytes that are not UTF-8 at byte {error.start}", "UTF-8 text"
        case RecordKind.value:
            return _checked_text(record, column)


def _parse_line(line: bytes, column: str) -> str | tuple[str, str]:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return f"bytes that are not UTF-8 at byte {error.start} of the line", "UTF-8 text"
    except json.JSONDecodeError as error:
        return f"invalid JSON ({error.msg} at column {error.colno})", "one JSON object a line"
    except RecursionError:
        return "JSON that is nested too deep", "one JSON object a line"
    except ValueError as error:  # for example an integer of more digits than Python reads
        return f"invalid JSON ({error})", "one JSON object a line"
    if not isinstance(row, dict):
        return f"a JSON {type(row).__name__}", "a JSON object"
    if column not in row:
        return f"no column {column!r}, but {sorted(row)}", f"the column {column!r}"
    return _checked_text(row[column], column)


def _checked_text(value: Any, column: str) -> str | tuple[str, str]:
    if not isinstance(value, str):
        return f"{column!r} holds {type(value).__name__}", "a string"
    # A lone surrogate, which JSON can spell, is not text: it becomes '?'.
    return value if value.isascii() else value.encode(errors="replace").decode()
