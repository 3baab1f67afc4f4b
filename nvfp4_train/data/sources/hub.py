"""Datasets of the Hugging Face `datasets` library: by name, from a local folder, streaming or not."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvfp4_train.data.error import DataError
from nvfp4_train.data.manifest import SourceRecord, text_digest
from nvfp4_train.data.sources.record import Cursor, RecordBatch, RecordKind

_BATCH_CHARACTERS = 1 << 20
_BATCH_ROWS = 1024


@dataclass(frozen=True, kw_only=True)
class HubDataset:
    """Which dataset to read.

    Args:
        name: Name on the hub, a local folder with data files, or a folder of ``save_to_disk``.
        subset: Name of the configuration; empty for the default.
        split: Split.
        revision: Branch, tag or commit; empty for the newest.
        streaming: Read while downloading, instead of downloading everything first.
    """

    name: str
    subset: str = ""
    split: str = "train"
    revision: str = ""
    streaming: bool = True


class HubSource:
    """The rows of a dataset.

    Args:
        dataset: Which one.
        column: Column that holds the text.

    Raises:
        DataError: It cannot be opened, or has no such column.
    """

    def __init__(self, dataset: HubDataset, *, column: str) -> None:
        with _explained(dataset.name):
            self.version = dataset_version(dataset)
            self._rows = _open(dataset, revision=self.version)
        names = self._rows.column_names  # None where a stream does not know them before it is read
        if names is None:
            names = list(next(iter(self._rows), {}))
        if column not in names:
            raise DataError(
                dataset.name, found=f"no column {column!r}, but {names}", expected=f"the column {column!r}",
                fix="name the column that holds the text",
            )  # fmt: skip
        self._rows = self._rows.select_columns([column])
        self._name = dataset.name
        self._column = column
        self._streaming = not hasattr(self._rows, "__len__")
        self._total = _num_rows(self._rows, dataset.split)
        self.identity: list[dict[str, Any]] = [
            {
                "name": dataset.name,
                "subset": dataset.subset,
                "split": dataset.split,
                "revision": dataset.revision,
                "column": column,
                "version": self.version,
            }
        ]

    def batches(self, cursor: Cursor | None) -> Iterator[RecordBatch]:
        """Yield all rows, or those from ``cursor`` on."""
        record = cursor["record"] if cursor else 0
        with _explained(self._name):
            pieces = self._streamed(cursor) if self._streaming else self._stored(record)
            for values, state in pieces:
                first = record + 1
                record += len(values)
                yield RecordBatch(
                    place=self._name,
                    kind=RecordKind.value,
                    column=self._column,
                    first=first,
                    records=values,
                    cursor={"record": record, "state": state},
                    fraction=record / self._total if self._total else None,
                )

    def describe(self, cursor: Cursor) -> list[SourceRecord]:
        """Return name and version of the dataset."""
        del cursor  # one dataset, however much of it was read
        return [SourceRecord(name=self._name, num_bytes=None, digest=self.version)]

    def _stored(self, record: int) -> Iterator[tuple[list[Any], None]]:
        for first in range(record, len(self._rows), _BATCH_ROWS):
            yield self._rows[first : first + _BATCH_ROWS][self._column], None

    def _streamed(self, cursor: Cursor | None) -> Iterator[tuple[list[Any], Any]]:
        rows = self._rows
        if cursor:
            rows.load_state_dict(cursor["state"])
        values: list[Any] = []
        size = 0
        for row in rows:
            value = row[self._column]
            values.append(value)
            size += len(value) if isinstance(value, str) else 1
            if size >= _BATCH_CHARACTERS or len(values) >= _BATCH_ROWS:
                # The state changes in place; JSON is what a copy of it will be read from.
                yield values, json.loads(json.dumps(rows.state_dict()))
                values, size = [], 0
        if values:
            yield values, json.loads(json.dumps(rows.state_dict()))


def _open(dataset: HubDataset, *, revision: str) -> Any:
    import datasets

    folder = Path(dataset.name).expanduser()
    if (folder / "dataset_dict.json").is_file():
        return datasets.load_from_disk(str(folder))[dataset.split]
    if (folder / "state.json").is_file():
        return datasets.load_from_disk(str(folder))
    return datasets.load_dataset(
        str(folder) if folder.is_dir() else dataset.name,
        dataset.subset or None,
        split=dataset.split,
        revision=None if folder.is_dir() else revision or None,
        streaming=dataset.streaming,
    )


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn what the library raises for a dataset that cannot be read into one clear error."""
    try:
        yield
    except ImportError as error:
        raise DataError(
            name, found=str(error), expected="the library `datasets`", fix="pip install 'nvfp4-train[data]'"
        ) from error
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            name, found=f"{type(error).__name__}: {error}", expected="a dataset that `datasets` can load",
            fix="check name, subset, split and the network; a local folder of parquet or jsonl files works too",
        ) from error  # fmt: skip


def _num_rows(rows: Any, split: str) -> int | None:
    if hasattr(rows, "__len__"):
        return len(rows)
    known = (rows.info.splits or {}).get(split)
    return known.num_examples if known is not None and known.num_examples else None


def dataset_version(dataset: HubDataset) -> str:
    """Return the commit on the hub, or a hash of names, sizes and times of a local folder's files."""
    folder = Path(dataset.name).expanduser()
    if folder.is_dir():
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        lines = [f"{path.relative_to(folder)} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files]
        return text_digest("\n".join(lines))
    from huggingface_hub import HfApi

    try:
        return str(HfApi().dataset_info(dataset.name, revision=dataset.revision or None).sha)
    except OSError:
        return dataset.revision  # no network: what follows works from the library's cache, or says what is wrong
