import pytest

from nvfp4_train.data.encoders.hugging_face import HuggingFaceEncoder
from nvfp4_train.data.encoders.load import EncoderSpec, load_encoder
from nvfp4_train.data.encoders.sentence_piece import SentencePieceEncoder
from nvfp4_train.data.error import DataError
from tests.support.tokenizer_files import write_huggingface, write_sentencepiece, write_tiktoken


def test_folders(tmp_path):
    (tmp_path / "sp").mkdir()
    write_sentencepiece(tmp_path / "sp" / "tokenizer.model")
    write_huggingface(tmp_path / "hf" / "tokenizer.json")
    assert isinstance(load_encoder(EncoderSpec(name=str(tmp_path / "sp"))), SentencePieceEncoder)
    encoder = load_encoder(EncoderSpec(name=str(tmp_path / "hf")))
    assert isinstance(encoder, HuggingFaceEncoder)
    assert encoder.name == str(tmp_path / "hf")


def test_end_token_by_name(tmp_path):
    path = write_huggingface(tmp_path / "tokenizer.json", end="<|stop|>")
    assert load_encoder(EncoderSpec(name=str(path), end_token="<|stop|>")).end_of_document == 0
    with pytest.raises(DataError, match=r"no token '<\|other\|>'"):
        load_encoder(EncoderSpec(name=str(path), end_token="<|other|>"))


@pytest.mark.parametrize(
    ("name", "words"),
    [("missing.json", "nothing there"), ("empty", "neither tokenizer.json"), ("a.txt", "a file of type '.txt'")],
)
def test_what_is_no_tokenizer(tmp_path, name, words):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.txt").touch()
    with pytest.raises(DataError, match=words) as caught:
        load_encoder(EncoderSpec(name=str(tmp_path / name)))
    assert caught.value.path == str(tmp_path / name)


def test_pattern_belongs_to_tiktoken(tmp_path):
    with pytest.raises(DataError, match=r"no \.tiktoken file"):
        load_encoder(EncoderSpec(name="bytes", tiktoken_pattern=r"\S+"))
    path = write_tiktoken(tmp_path / "a.tiktoken")
    assert load_encoder(EncoderSpec(name=str(path), tiktoken_pattern=r"\S+")).vocab_size == 260
