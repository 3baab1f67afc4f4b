import hashlib

import pytest

from nvfp4_train.data.error import DataError
from nvfp4_train.data.manifest import (
    Shard,
    SourceRecord,
    TokenizerRecord,
    TokenManifest,
    describe_pair,
    file_digest,
    manifest_path,
    read_manifest,
    shard_prefixes,
    text_digest,
    write_manifest,
)
from tests.support.token_files import write_pair


@pytest.fixture
def manifest():
    return TokenManifest(
        num_documents=2,
        num_tokens=7,
        num_empty=1,
        num_errors=1,
        errors=["a.jsonl:3: invalid JSON"],
        dtype="uint16",
        tokenizer=TokenizerRecord(name="bytes", digest="d", vocab_size=257, end_of_document=256),
        text_digest="t",
        sources=[SourceRecord(name="a.jsonl", num_bytes=10, digest="s")],
        shards=[Shard(name="x_00000", num_documents=2, num_tokens=7, bin_digest="b", idx_digest="i")],
        versions={"nvfp4_train": "1"},
        job="j",
    )


def test_round_trip(tmp_path, manifest):
    write_manifest(tmp_path / "x", manifest)
    assert read_manifest(tmp_path / "x") == manifest
    assert manifest_path(tmp_path / "x") == tmp_path / "x.manifest.json"
    assert [path.name for path in tmp_path.iterdir()] == ["x.manifest.json"]


def test_no_manifest_is_none(tmp_path):
    assert read_manifest(tmp_path / "x") is None


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"tokenizer": {}, "sources": [], "shards": []}', "\xff"])
def test_damaged_manifest_is_named(tmp_path, content):
    manifest_path(tmp_path / "x").write_text(content, encoding="latin-1")
    with pytest.raises(DataError, match="no readable manifest") as caught:
        read_manifest(tmp_path / "x")
    assert caught.value.path == str(tmp_path / "x.manifest.json")


def test_a_prefix_is_a_pair_or_its_shards(tmp_path, manifest):
    write_pair(tmp_path / "pair", [[1]])
    assert shard_prefixes(tmp_path / "pair") == [tmp_path / "pair"]
    write_manifest(tmp_path / "x", manifest)
    assert shard_prefixes(tmp_path / "x") == [tmp_path / "x_00000"]
    with pytest.raises(DataError, match="neither"):
        shard_prefixes(tmp_path / "missing")


def test_digests_follow_the_content(tmp_path):
    write_pair(tmp_path / "a", [[1, 2]])
    write_pair(tmp_path / "b", [[1, 3]])
    shards = [describe_pair(tmp_path / name, num_documents=1, num_tokens=2) for name in ("a", "b")]
    assert shards[0].idx_digest == shards[1].idx_digest
    assert shards[0].bin_digest != shards[1].bin_digest
    (tmp_path / "t").write_text("text")
    expected = hashlib.blake2b(b"text", digest_size=16).hexdigest()
    assert file_digest(tmp_path / "t") == text_digest("text") == expected
