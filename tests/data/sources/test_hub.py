import sys
from pathlib import Path

import pytest

from nvfp4_train.data.error import DataError
from nvfp4_train.data.sources import hub
from nvfp4_train.data.sources.hub import HubDataset, HubSource, dataset_version
from tests.support.text_sources import assert_resumes_anywhere, write_parquet

datasets = pytest.importorskip("datasets")
TEXTS = [f"document {number} " + "words " * (number % 9) for number in range(900)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    root = tmp_path / "fineweb"
    root.mkdir()
    write_parquet(root / "000.parquet", TEXTS[:500], group_rows=130)
    write_parquet(root / "001.parquet", TEXTS[500:], group_rows=130)
    return root


@pytest.mark.parametrize("streaming", [True, False])
def test_every_cursor_continues(folder, streaming, monkeypatch):
    monkeypatch.setattr(hub, "_BATCH_CHARACTERS", 6000)
    monkeypatch.setattr(hub, "_BATCH_ROWS", 200)

    def source():
        return HubSource(HubDataset(name=str(folder), streaming=streaming), column="text")

    assert assert_resumes_anywhere(source(), source) == TEXTS


def test_rows_and_fraction(folder):
    source = HubSource(HubDataset(name=str(folder), streaming=False), column="text")
    batches = list(source.batches(None))
    assert batches[0].first == 1
    assert batches[-1].fraction == 1.0
    assert source.describe(batches[-1].cursor)[0].name == str(folder)


def test_what_save_to_disk_wrote(tmp_path, folder):
    rows = datasets.Dataset.from_dict({"text": TEXTS})
    rows.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": rows, "test": rows.select(range(3))}).save_to_disk(str(tmp_path / "both"))
    for name, split, count in (("one", "train", 900), ("both", "train", 900), ("both", "test", 3)):
        source = HubSource(HubDataset(name=str(tmp_path / name), split=split), column="text")
        assert sum(len(batch.records) for batch in source.batches(None)) == count


def test_missing_column_lists_the_columns(folder):
    with pytest.raises(DataError, match=r"no column 'body', but \['text', 'id'"):
        HubSource(HubDataset(name=str(folder)), column="body")


@pytest.mark.parametrize(
    "dataset", [{"name": "no/such-dataset"}, {"split": "nope"}, {"subset": "nope"}], ids=["name", "split", "subset"]
)
def test_what_cannot_be_loaded_is_one_clear_error(folder, dataset):
    with pytest.raises(DataError, match="a dataset that `datasets` can load"):
        HubSource(HubDataset(**({"name": str(folder)} | dataset)), column="text")


def test_version_follows_local_files(folder):
    before = dataset_version(HubDataset(name=str(folder)))
    assert dataset_version(HubDataset(name=str(folder))) == before
    write_parquet(folder / "002.parquet", ["more"])
    assert dataset_version(HubDataset(name=str(folder))) != before


def test_a_name_is_pinned_to_its_commit(folder, monkeypatch):
    import huggingface_hub

    calls = []

    class Api:
        def dataset_info(self, name, *, revision):
            return type("Info", (), {"sha": "abc123"})

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    load_dataset = datasets.load_dataset

    def load(name, subset, **options):
        calls.append((name, subset, options["revision"]))
        return load_dataset(str(folder), split="train", streaming=True)

    monkeypatch.setattr(datasets, "load_dataset", load)
    source = HubSource(HubDataset(name="org/name", subset="sample-10BT"), column="text")
    assert calls == [("org/name", "sample-10BT", "abc123")]
    assert source.identity[0]["version"] == "abc123"


def test_missing_library_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"nvfp4-train\[data\]"):
        HubSource(HubDataset(name=str(Path(tmp_path))), column="text")
