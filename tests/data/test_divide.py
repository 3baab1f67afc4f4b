import numpy as np
import pytest

from nvfp4_train.data import divide
from nvfp4_train.data.divide import divide_by_count, divide_by_share, divide_by_size
from nvfp4_train.data.error import DataError
from nvfp4_train.data.indexed import IndexedTokens
from nvfp4_train.data.manifest import read_manifest
from nvfp4_train.data.merge import merge_pairs
from tests.support.token_files import GOLDEN_PAIRS, write_pair

GOLDEN = GOLDEN_PAIRS / "docsA_uint16"
MODES = GOLDEN_PAIRS / "multi_seq_modes_int32"


def assert_merging_restores(shards, original, tmp_path):
    merge_pairs(shards, tmp_path / "restored")
    for ending in (".bin", ".idx"):
        original_bytes = original.with_name(original.name + ending).read_bytes()
        assert (tmp_path / f"restored{ending}").read_bytes() == original_bytes


@pytest.mark.parametrize("original", [GOLDEN, MODES, GOLDEN_PAIRS / "docsB_int32"])
def test_shards_of_a_size(tmp_path, original):
    whole = IndexedTokens(original)
    size = whole.num_tokens // 4
    shards = divide_by_size(original, tmp_path / "part", shard_tokens=size)
    assert [path.name for path in shards[:2]] == ["part_00000", "part_00001"]
    sizes = [IndexedTokens(path).num_tokens for path in shards]
    longest = np.diff(whole.document_starts()).max()
    assert all(size <= found < size + longest for found in sizes[:-1])
    assert_merging_restores(shards, original, tmp_path)


@pytest.mark.parametrize("num_shards", [1, 3, 12])
@pytest.mark.parametrize("original", [GOLDEN, MODES])
def test_number_of_shards(tmp_path, original, num_shards):
    shards = divide_by_count(original, tmp_path / "part", num_shards=num_shards)
    assert len(shards) == num_shards
    assert all(IndexedTokens(path).num_documents for path in shards)
    assert_merging_restores(shards, original, tmp_path)


def test_number_of_shards_where_one_document_is_longer_than_all_others(tmp_path):
    write_pair(tmp_path / "pair", [[1], [2] * 1000, [3], [4]])
    shards = divide_by_count(tmp_path / "pair", tmp_path / "part", num_shards=4)
    assert [IndexedTokens(path).num_tokens for path in shards] == [1, 1000, 1, 1]


def test_small_blocks_change_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(divide, "_BLOCK", 7)
    shards = divide_by_count(GOLDEN, tmp_path / "part", num_shards=3)
    assert_merging_restores(shards, GOLDEN, tmp_path)


def test_more_shards_than_documents(tmp_path):
    with pytest.raises(DataError, match="12 documents"):
        divide_by_count(MODES, tmp_path / "part", num_shards=13)


def test_shares_keep_equal_documents_together(tmp_path):
    documents = [[index % 50, 1, 2] for index in range(400)]
    write_pair(tmp_path / "pair", documents)
    train, validation = divide_by_share(tmp_path / "pair", tmp_path / "out", shares={"train": 0.8, "validation": 0.2})
    assert (train.name, validation.name) == ("out_train", "out_validation")
    sides = [[document.tolist() for document in IndexedTokens(path).documents()] for path in (train, validation)]
    assert sides[1]
    assert not {tuple(document) for document in sides[0]} & {tuple(document) for document in sides[1]}
    # Each side keeps the order, and together they hold everything.
    assert sides[0] == [document for document in documents if document in sides[0]]
    assert len(sides[0]) + len(sides[1]) == 400


@pytest.mark.parametrize("shares", [{"a": 0.5, "b": 0.4}, {"a": 1.5, "b": -0.5}, {"a": float("nan"), "b": 0.5}])
def test_shares_that_do_not_add_up(tmp_path, shares):
    with pytest.raises(DataError, match="add up to 1"):
        divide_by_share(GOLDEN, tmp_path / "out", shares=shares)
    assert list(tmp_path.iterdir()) == []


def test_manifests_of_the_parts(tmp_path):
    merge_pairs([GOLDEN], tmp_path / "pair")
    shards = divide_by_count(tmp_path / "pair", tmp_path / "part", num_shards=3)
    whole = read_manifest(tmp_path / "part")
    parts = [read_manifest(path) for path in shards]
    assert [shard.name for shard in whole.shards] == [path.name for path in shards]
    assert sum(part.num_tokens for part in parts) == whole.num_tokens == 19144
    assert [part.shards for part in parts] == [[shard] for shard in whole.shards]


def test_an_output_that_exists_is_left_alone(tmp_path):
    write_pair(tmp_path / "part_00000", [[1]])
    with pytest.raises(DataError, match="no file of that name"):
        divide_by_count(GOLDEN, tmp_path / "part", num_shards=2)
    assert IndexedTokens(tmp_path / "part_00000").tokens.tolist() == [1]
