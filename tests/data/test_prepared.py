import json
from dataclasses import asdict, replace

import pytest

from nvfp4_train.data.manifest import read_manifest, write_manifest
from nvfp4_train.data.merge import merge_pairs
from nvfp4_train.data.prepared import MANIFEST, Manifest, PreparedData, write_prepared
from nvfp4_train.data.split import Split
from tests.support.token_files import write_pair


@pytest.fixture
def manifest():
    return Manifest(
        fingerprint="f", source_fingerprint="s", num_files=1, num_documents={"train": 1}, num_tokens={"train": 1},
        split_method="by_document", vocab_size=10, dtype="uint16", file_digests={"train.idx": "d"}, versions={},
    )  # fmt: skip


def test_split_of_one_pair(tmp_path, manifest):
    prepared = PreparedData(folder=tmp_path, manifest=manifest)
    assert prepared.prefixes(Split.train) == [tmp_path / "train"]
    assert prepared.tokenizer_path == tmp_path / "tokenizer.json"


def test_split_of_shards(tmp_path, manifest):
    write_pair(tmp_path / "pair", [[1]])
    merge_pairs([tmp_path / "pair"], tmp_path / "tokens_validation")
    found = read_manifest(tmp_path / "tokens_validation")
    shards = [replace(found.shards[0], name=f"tokens_validation_{index:05}") for index in range(2)]
    write_manifest(tmp_path / "tokens_validation", replace(found, shards=shards))
    prepared = PreparedData(folder=tmp_path, manifest=manifest)
    assert [path.name for path in prepared.prefixes(Split.validation)] == [shard.name for shard in shards]


def test_manifest_is_written(tmp_path, manifest):
    write_prepared(tmp_path / MANIFEST, manifest)
    assert json.loads((tmp_path / MANIFEST).read_text()) == asdict(manifest)
