from dataclasses import replace

import numpy as np
import pytest

from nvfp4_train.data.error import DataError
from nvfp4_train.data.indexed_writer import IndexedWriter
from nvfp4_train.data.manifest import TokenizerRecord, read_manifest, write_manifest
from nvfp4_train.data.merge import merge_pairs
from nvfp4_train.data.verify import verify_tokens
from tests.support.token_files import GOLDEN_PAIRS, write_pair


@pytest.fixture
def prefix(tmp_path):
    """A pair with a manifest that names a tokenizer of 10 entries."""
    write_pair(tmp_path / "source", [[5, 2], [], [6, 7, 2]])
    manifest = merge_pairs([tmp_path / "source"], tmp_path / "pair")
    tokenizer = TokenizerRecord(name="t", digest="1", vocab_size=10, end_of_document=2)
    write_manifest(tmp_path / "pair", replace(manifest, tokenizer=tokenizer))
    return tmp_path / "pair"


def change(prefix, **changes):
    write_manifest(prefix, replace(read_manifest(prefix), **changes))


def test_a_right_pair(prefix):
    verified = verify_tokens(prefix)
    assert (verified.num_tokens, verified.num_documents) == (5, 3)
    assert len(verified.checks) == 4


def test_golden_pairs():
    assert verify_tokens(GOLDEN_PAIRS / "docsA_uint16", vocab_size=32000).num_documents == 200
    assert verify_tokens(GOLDEN_PAIRS / "docsB_int32").checks[-1] == "token ids not negative"


def test_token_beyond_the_vocabulary_is_named_with_its_place(prefix, tmp_path, monkeypatch):
    monkeypatch.setattr("nvfp4_train.data.verify._CHUNK_TOKENS", 2)
    with pytest.raises(DataError, match=r"token id 7 at token 3, in document 2") as caught:
        verify_tokens(prefix, vocab_size=7)
    assert caught.value.path == str(tmp_path / "pair.bin")
    change(prefix, tokenizer=replace(read_manifest(prefix).tokenizer, vocab_size=5))
    with pytest.raises(DataError, match=r"token id 5 at token 0"):
        verify_tokens(prefix)


def test_negative_token(tmp_path):
    write_pair(tmp_path / "pair", [[1, -1]], dtype="<i4")
    with pytest.raises(DataError, match="token id -1 at token 1"):
        verify_tokens(tmp_path / "pair")


def test_float_tokens(tmp_path):
    with IndexedWriter(tmp_path / "pair", dtype=np.dtype("<f4")) as writer:
        writer.add_document([0.5])
    with pytest.raises(DataError, match="float32 values"):
        verify_tokens(tmp_path / "pair")


def test_changed_token_of_the_same_size(prefix):
    path = prefix.with_name("pair.bin")
    raw = bytearray(path.read_bytes())
    raw[0] ^= 1
    path.write_bytes(raw)
    with pytest.raises(DataError, match="content with hash"):
        verify_tokens(prefix)


def test_index_of_another_pair_of_the_same_size(prefix, tmp_path):
    write_pair(tmp_path / "other", [[5], [6], [1, 2, 3]])
    prefix.with_name("pair.idx").write_bytes((tmp_path / "other.idx").read_bytes())
    with pytest.raises(DataError, match="content with hash") as caught:
        verify_tokens(prefix)
    assert caught.value.path == str(tmp_path / "pair.idx")


def test_document_without_its_end(prefix):
    change(prefix, tokenizer=replace(read_manifest(prefix).tokenizer, end_of_document=3))
    with pytest.raises(DataError, match="document 0 that ends with 2"):
        verify_tokens(prefix)


def test_counts_of_the_manifest(prefix):
    change(prefix, num_documents=4)
    with pytest.raises(DataError, match="5 tokens in 3 documents"):
        verify_tokens(prefix)


def test_missing_shard(prefix):
    prefix.with_name("pair.idx").unlink()
    with pytest.raises(DataError, match="no file"):
        verify_tokens(prefix)
