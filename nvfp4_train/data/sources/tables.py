"""The text column of parquet files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nvfp4_train.data.error import DataError
from nvfp4_train.data.sources.record import RecordBatch, RecordKind

_BATCH_ROWS = 1024


def read_parquet(path: Path, *, place: str, column: str, start: dict[str, Any]) -> Iterator[RecordBatch]:
    """Yield the values of a column.

    Args:
        path: Local file.
        place: How to name it in errors.
        column: Column that holds the text.
        start: ``record``, rows to skip; empty for the beginning.

    Raises:
        DataError: The file cannot be read, or has no such column of strings.
    """
    arrow, parquet = _libraries(place)
    try:
        with parquet.ParquetFile(path) as file:
            _check_column(arrow, file.schema_arrow, place, column)
            done, total = start.get("record", 0), max(1, file.metadata.num_rows)
            for first, batch in _batches(file, column, skip=done):
                values = batch.column(0).to_pylist()[max(0, done - first) :]
                done = first + batch.num_rows
                yield RecordBatch(
                    place=place,
                    kind=RecordKind.value,
                    column=column,
                    first=done - len(values) + 1,
                    records=values,
                    cursor={"record": done},
                    fraction=done / total,
                )
    except (arrow.ArrowException, OSError) as error:
        raise DataError(
            place, found=f"no readable parquet data ({error})", expected="a complete parquet file",
            fix="copy or write it again",
        ) from error  # fmt: skip


def _check_column(arrow: Any, schema: Any, place: str, column: str) -> None:
    if column not in schema.names:
        raise DataError(
            place, found=f"no column {column!r}, but {schema.names}", expected=f"the column {column!r}",
            fix="name the column that holds the text",
        )  # fmt: skip
    kind = schema.field(column).type
    if arrow.types.is_dictionary(kind):
        kind = kind.value_type
    if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind) or arrow.types.is_string_view(kind)):
        raise DataError(
            place, found=f"column {column!r} of type {kind}", expected="a column of strings",
            fix="name the column that holds the text",
        )  # fmt: skip


def _batches(file: Any, column: str, *, skip: int) -> Iterator[tuple[int, Any]]:
    """Yield (first row, batch), leaving out batches that end by row ``skip``; no batch crosses row groups.

    Batches therefore end at the same rows wherever reading begins.
    """
    first = 0
    for group in range(file.num_row_groups):
        end = first + file.metadata.row_group(group).num_rows
        if end > skip:
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, row_groups=[group], columns=[column]):
                if first + batch.num_rows > skip:
                    yield first, batch
                first += batch.num_rows
        first = end


def _libraries(place: str) -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(
            place, found="no library `pyarrow`", expected="it to be installed", fix="pip install 'nvfp4-train[data]'"
        ) from error
    return pyarrow, parquet
