from dataclasses import replace

import pytest

from nvfp4_train.data.error import DataError
from nvfp4_train.data.indexed import IndexedTokens
from nvfp4_train.data.manifest import TokenizerRecord, read_manifest, write_manifest
from nvfp4_train.data.merge import merge_pairs
from tests.support.token_files import GOLDEN_PAIRS, write_pair

GOLDEN = [GOLDEN_PAIRS / "docsA_uint16", GOLDEN_PAIRS / "docsA2_uint16"]
TOKENIZER = TokenizerRecord(name="t", digest="1", vocab_size=10, end_of_document=2)


def with_manifest(path, documents, **changes):
    write_pair(path, documents)
    manifest = merge_pairs([path], path.with_name(path.name + "_described"))
    write_manifest(path, replace(manifest, shards=[replace(manifest.shards[0], name=path.name)], **changes))
    return path


def test_merge_is_megatrons_byte_for_byte(tmp_path):
    manifest = merge_pairs(GOLDEN, tmp_path / "new" / "merged")
    for ending in (".bin", ".idx"):
        assert (tmp_path / "new" / f"merged{ending}").read_bytes() == (
            GOLDEN_PAIRS / f"merged_A_A2_uint16{ending}"
        ).read_bytes()
    pair = IndexedTokens(tmp_path / "new" / "merged")
    assert (manifest.num_documents, manifest.num_tokens) == (pair.num_documents, pair.num_tokens) == (207, 19208)
    assert read_manifest(tmp_path / "new" / "merged") == manifest
    assert manifest.tokenizer is None


def test_mixed_dtypes_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(DataError, match="tokens of int32") as caught:
        merge_pairs([*GOLDEN, GOLDEN_PAIRS / "docsB_int32"], tmp_path / "merged")
    assert caught.value.path == str(GOLDEN_PAIRS / "docsB_int32.idx")
    assert list(tmp_path.iterdir()) == []


def test_manifests_are_added_up(tmp_path):
    one = with_manifest(tmp_path / "one", [[1, 2]], tokenizer=TOKENIZER, num_empty=1, num_errors=2, errors=["e"])
    two = with_manifest(tmp_path / "two", [[3, 2]], tokenizer=replace(TOKENIZER, name="other path"), num_empty=4)
    merged = merge_pairs([one, two], tmp_path / "merged")
    assert (merged.num_empty, merged.num_errors, merged.errors) == (5, 2, ["e"])
    assert merged.tokenizer == TOKENIZER
    assert merge_pairs([one, GOLDEN[0]], tmp_path / "half").tokenizer is None


def test_other_tokenizers_are_refused(tmp_path):
    one = with_manifest(tmp_path / "one", [[1, 2]], tokenizer=TOKENIZER)
    for name, changes in (("a", {"digest": "2"}), ("b", {"end_of_document": 3})):
        other = with_manifest(tmp_path / name, [[3, 2]], tokenizer=replace(TOKENIZER, **changes))
        with pytest.raises(DataError, match="same tokenizer"):
            merge_pairs([one, other], tmp_path / "merged")


def test_sets_of_shards_are_merged(tmp_path):
    for index, documents in enumerate([[[1], [2]], [[3]]]):
        write_pair(tmp_path / f"set_{index:05}", documents)
    manifest = merge_pairs([tmp_path / "set_00000", tmp_path / "set_00001"], tmp_path / "set")
    shards = [replace(manifest.shards[0], name=f"set_{index:05}") for index in range(2)]
    write_manifest(tmp_path / "all", replace(manifest, shards=shards))
    merge_pairs([tmp_path / "all"], tmp_path / "merged")
    assert IndexedTokens(tmp_path / "merged").tokens.tolist() == [1, 2, 3]


def test_an_output_that_exists_is_left_alone(tmp_path):
    write_pair(tmp_path / "pair", [[1]])
    with pytest.raises(DataError, match="no file of that name"):
        merge_pairs(GOLDEN, tmp_path / "pair")
    assert IndexedTokens(tmp_path / "pair").tokens.tolist() == [1]


def test_output_in_a_place_that_is_a_file(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="a folder that can be written"):
        merge_pairs(GOLDEN, tmp_path / "file" / "pair")


def test_truncated_input_is_refused(tmp_path):
    write_pair(tmp_path / "pair", [[1, 2, 3]])
    (tmp_path / "pair.bin").write_bytes(b"\0\0")
    with pytest.raises(DataError, match="truncated"):
        merge_pairs([tmp_path / "pair"], tmp_path / "merged")
