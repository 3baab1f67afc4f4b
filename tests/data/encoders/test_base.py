import numpy as np
import pytest

from nvfp4_train.data.encoders.base import Encoder
from nvfp4_train.data.encoders.load import EncoderSpec, load_encoder
from tests.support.tokenizer_files import write_huggingface, write_sentencepiece, write_tiktoken

TEXTS = ["some words", "", "na\N{LATIN SMALL LETTER I WITH DIAERESIS}ve \N{GRINNING FACE} <|endoftext|> end"]


@pytest.fixture(params=["bytes", "huggingface", "sentencepiece", "tiktoken"])
def encoder(request, tmp_path) -> Encoder:
    match request.param:
        case "bytes":
            return load_encoder(EncoderSpec(name="bytes"))
        case "huggingface":
            return load_encoder(EncoderSpec(name=str(write_huggingface(tmp_path / "tokenizer.json"))))
        case "sentencepiece":
            return load_encoder(EncoderSpec(name=str(write_sentencepiece(tmp_path / "tokenizer.model"))))
    path = write_tiktoken(tmp_path / "own.tiktoken")
    return load_encoder(EncoderSpec(name=str(path), tiktoken_pattern=r"\S+|\s+"))


def test_every_tokenizer_gives_ids_and_text_back(encoder):
    encoded = encoder.encode(TEXTS)
    assert [encoder.decode(ids.tolist()) for ids in encoded] == TEXTS
    for ids in encoded:
        assert ids.dtype == np.int32
        assert np.all((ids >= 0) & (ids < encoder.vocab_size))
        # Text that spells the end is text.
        assert encoder.end_of_document not in ids


def test_texts_are_encoded_alone_or_together_alike(encoder):
    together = encoder.encode(TEXTS)
    assert all(np.array_equal(encoder.encode([text])[0], ids) for text, ids in zip(TEXTS, together, strict=True))
    assert encoder.encode([]) == []


def test_every_tokenizer_describes_itself(encoder):
    assert encoder.name
    assert encoder.digest
    assert encoder.library
    assert 0 <= encoder.end_of_document < encoder.vocab_size
    assert encoder.special_id("no such token") is None
