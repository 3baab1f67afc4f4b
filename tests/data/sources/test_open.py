import pytest

from nvfp4_train.data.error import DataError
from nvfp4_train.data.sources.file_source import FileSource
from nvfp4_train.data.sources.hub import HubDataset
from nvfp4_train.data.sources.open import SourceSpec, open_source
from nvfp4_train.data.staging import Staging
from tests.support.text_sources import texts_of, write_jsonl


def test_files_of_a_column(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["one"], column="body")
    source = open_source(
        SourceSpec(inputs=[str(path)], column="body"), staging=Staging(tmp_path / "cache", max_bytes=0)
    )
    assert isinstance(source, FileSource)
    assert texts_of(source.batches(None)) == ["one"]


@pytest.mark.parametrize(
    "spec", [SourceSpec(), SourceSpec(inputs=["a"], dataset=HubDataset(name="b"))], ids=["neither", "both"]
)
def test_one_of_files_and_dataset(tmp_path, spec):
    with pytest.raises(DataError, match="give --input or --dataset"):
        open_source(spec, staging=Staging(tmp_path, max_bytes=0))
