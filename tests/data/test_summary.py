import pytest

from nvfp4_train.data.encoders.raw_bytes import ByteEncoder
from nvfp4_train.data.error import DataError
from nvfp4_train.data.indexed import IndexedTokens
from nvfp4_train.data.manifest import read_manifest
from nvfp4_train.data.merge import merge_pairs
from nvfp4_train.data.summary import document_lines, manifest_lines, summarize, token_range
from tests.support.token_files import GOLDEN_PAIRS, write_pair


def test_numbers_of_a_pair(tmp_path):
    write_pair(tmp_path / "pair", [[5, 6, 7], [], [9]])
    summary = summarize(tmp_path / "pair")
    assert (summary.num_documents, summary.num_empty, summary.num_sequences, summary.num_tokens) == (3, 1, 3, 4)
    assert (summary.document_tokens, summary.token_range) == ((0, 1, 3), (5, 9))
    assert summary.num_bytes == 8 + 34 + 3 * 12 + 4 * 8
    text = "\n".join(summary.lines())
    for words in ("4 of uint16", "1 of them empty", "0 to 3, median 1, mean 1.3", "token ids: 5 to 9"):
        assert words in text


def test_pair_with_modes():
    summary = summarize(GOLDEN_PAIRS / "multi_seq_modes_int32")
    assert summary.has_modes
    assert "with modes" in "\n".join(summary.lines())


def test_pairs_without_tokens_or_documents(tmp_path):
    write_pair(tmp_path / "empty", [[]])
    assert summarize(tmp_path / "empty").token_range is None
    write_pair(tmp_path / "none", [])
    assert summarize(tmp_path / "none").document_tokens is None
    assert len(summarize(tmp_path / "none").lines()) == 3


def test_range_is_that_of_all_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("nvfp4_train.data.summary._CHUNK_TOKENS", 2)
    assert token_range(write_pair(tmp_path / "pair", [[5, 6, 1, 3, 9]])) == (1, 9)


def test_document_as_ids_and_text(tmp_path):
    write_pair(tmp_path / "pair", [[1], [*"5 \N{EURO SIGN}".encode(), 256]])
    assert document_lines(tmp_path / "pair", 1, ByteEncoder())[-1] == "5 \N{EURO SIGN}"
    assert document_lines(tmp_path / "pair", 0, None) == ["document 0: 1 tokens", "[1]"]


def test_documents_are_counted_over_shards(tmp_path):
    write_pair(tmp_path / "a", [[1], [2]])
    write_pair(tmp_path / "b", [[3]])
    merge_pairs([tmp_path / "a", tmp_path / "b"], tmp_path / "set")
    manifest = (tmp_path / "set.manifest.json").read_text().replace('"name": "set"', '"name": "b"')
    (tmp_path / "set.manifest.json").write_text(manifest)
    assert document_lines(tmp_path / "set", 0, None)[1] == "[3]"


@pytest.mark.parametrize("index", [-1, 2])
def test_document_that_does_not_exist(tmp_path, index):
    write_pair(tmp_path / "pair", [[1], [2]])
    with pytest.raises(DataError, match="2 documents"):
        document_lines(tmp_path / "pair", index, None)


def test_ids_beyond_the_vocabulary_are_not_decoded(tmp_path):
    write_pair(tmp_path / "pair", [[1, 300]])
    with pytest.raises(DataError, match="token id 300 in document 0"):
        document_lines(tmp_path / "pair", 0, ByteEncoder())


def test_manifest_without_tokenizer(tmp_path):
    merge_pairs([GOLDEN_PAIRS / "docsA_uint16"], tmp_path / "x")
    lines = manifest_lines(read_manifest(tmp_path / "x"))
    assert "text unknown" in lines[0]
    assert not any("tokenizer" in line for line in lines)
    assert IndexedTokens(tmp_path / "x").num_documents == 200
