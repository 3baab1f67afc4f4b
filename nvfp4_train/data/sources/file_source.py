"""Records from a list of files, one file after the other."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from nvfp4_train.data.manifest import SourceRecord, file_digest
from nvfp4_train.data.sources.files import LINE_ENDINGS, TABLE_ENDINGS, SourceFile
from nvfp4_train.data.sources.lines import read_lines, read_text
from nvfp4_train.data.sources.record import Cursor, RecordBatch
from nvfp4_train.data.sources.tables import read_parquet
from nvfp4_train.data.staging import Staging


class FileSource:
    """Files in a fixed order; those on object stores are brought here one by one.

    Args:
        files: What to read.
        column: Key or column that holds the text.
        staging: Where remote files go.
    """

    def __init__(self, files: list[SourceFile], *, column: str, staging: Staging) -> None:
        self.files = files
        self.identity: list[dict[str, Any]] = [
            {"name": file.name, "num_bytes": file.num_bytes, "version": file.version, "column": column}
            for file in files
        ]
        self._column = column
        self._staging = staging
        self._num_bytes = sum(file.num_bytes for file in files)
        self._digests: dict[int, str] = {}

    def batches(self, cursor: Cursor | None) -> Iterator[RecordBatch]:
        """Yield all records, or those from ``cursor`` on."""
        cursor = cursor or {"file": 0, "within": {}}
        done = sum(file.num_bytes for file in self.files[: cursor["file"]])
        start = cursor["within"]
        for index in range(cursor["file"], len(self.files)):
            file = self.files[index]
            for batch in self._read(index, start):
                is_whole = batch.cursor == {}
                position = {"file": index + 1, "within": {}} if is_whole else {"file": index, "within": batch.cursor}
                share = (done + file.num_bytes * (batch.fraction or 0.0)) / self._num_bytes
                yield replace(batch, cursor=position, fraction=share)
            done += file.num_bytes
            start = {}

    def describe(self, cursor: Cursor) -> list[SourceRecord]:
        """Return name, size and hash of each file of which something was read."""
        num_files = cursor["file"] + (1 if cursor["within"] else 0)
        records = []
        for index, file in enumerate(self.files[:num_files]):
            if index not in self._digests:  # read by a process that was killed, or not to its end
                path = self._staging.file(file.name)
                self._digests[index] = file_digest(path)
                self._staging.release(path)
            records.append(SourceRecord(name=file.name, num_bytes=file.num_bytes, digest=self._digests[index]))
        return records

    def _read(self, index: int, start: dict[str, Any]) -> Iterator[RecordBatch]:
        file = self.files[index]
        path = self._staging.file(file.name)
        try:
            name = file.name.lower()
            if name.endswith(LINE_ENDINGS):
                yield from read_lines(path, place=file.name, column=self._column, start=start)
            elif name.endswith(TABLE_ENDINGS):
                yield from read_parquet(path, place=file.name, column=self._column, start=start)
            else:
                yield from read_text(path, place=file.name)
            self._digests[index] = file_digest(path)  # now, while it is in memory
        finally:
            self._staging.release(path)
