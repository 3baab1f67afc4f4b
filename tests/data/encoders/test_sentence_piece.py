import sys

import pytest

from nvfp4_train.data.encoders.sentence_piece import SentencePieceEncoder
from nvfp4_train.data.error import DataError
from tests.support.tokenizer_files import write_sentencepiece


def encoder(path):
    return SentencePieceEncoder(path, name=str(path))


def test_end_and_special_ids(tmp_path):
    with_end = encoder(write_sentencepiece(tmp_path / "a.model"))
    assert with_end.end_of_document == with_end.special_id("</s>") == 2
    assert with_end.special_id("<unk>") == 0
    assert encoder(write_sentencepiece(tmp_path / "b.model", eos_id=-1)).end_of_document is None


def test_no_token_is_added(tmp_path):
    ids = encoder(write_sentencepiece(tmp_path / "a.model")).encode(["x"])[0].tolist()
    assert not {1, 2} & set(ids)


def test_file_that_is_no_model(tmp_path):
    pytest.importorskip("sentencepiece")
    (tmp_path / "a.model").write_text("nonsense")
    with pytest.raises(DataError, match="no model"):
        encoder(tmp_path / "a.model")


def test_missing_library_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(DataError, match=r"nvfp4-train\[data\]"):
        encoder(tmp_path / "a.model")
