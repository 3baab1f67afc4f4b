"""From what a user names to a source."""

from dataclasses import dataclass, field

from nvfp4_train.data.error import DataError
from nvfp4_train.data.sources.file_source import FileSource
from nvfp4_train.data.sources.files import find_source_files
from nvfp4_train.data.sources.hub import HubDataset, HubSource
from nvfp4_train.data.sources.record import Source
from nvfp4_train.data.staging import Staging


@dataclass(frozen=True, kw_only=True)
class SourceSpec:
    """What to read: files, or a dataset.

    Args:
        inputs: Files, folders, globs or URIs; empty where ``dataset`` is given.
        dataset: A dataset; None where ``inputs`` are given.
        column: Key or column that holds the text.
    """

    inputs: list[str] = field(default_factory=list)
    dataset: HubDataset | None = None
    column: str = "text"


def open_source(spec: SourceSpec, *, staging: Staging) -> Source:
    """Open a source.

    Raises:
        DataError: It cannot be read, or both or neither of inputs and dataset are given.
    """
    if bool(spec.inputs) == (spec.dataset is not None):
        raise DataError(
            "source", found="both inputs and a dataset" if spec.inputs else "neither inputs nor a dataset",
            expected="one of them", fix="give --input or --dataset",
        )  # fmt: skip
    if spec.dataset is not None:
        return HubSource(spec.dataset, column=spec.column)
    return FileSource(find_source_files(spec.inputs), column=spec.column, staging=staging)
