import hashlib
import json
import random

import numpy as np
import pytest

from nvfp4_train.data import tokenizer as module
from nvfp4_train.data.corpus import Document
from nvfp4_train.data.split import Split
from nvfp4_train.data.tokenizer import END_OF_DOCUMENT, encode_documents, load_tokenizer, train_tokenizer
from tests.support.token_files import GOLDEN_TEXT


def document(text: str) -> Document:
    return Document(text=text, digest=hashlib.blake2b(text.encode(), digest_size=16).digest())


@pytest.fixture(scope="module")
def documents():
    lines = (GOLDEN_TEXT / "python_topics.jsonl").read_text().splitlines()[:20]
    return [document(json.loads(line)["text"]) for line in lines]


@pytest.fixture(scope="module")
def tokenizer(documents, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(documents, vocab_size=512).save(str(path))
    return load_tokenizer(path)


def encode(tokenizer, texts):
    pairs = [(Split.train, document(text)) for text in texts]
    done = []
    encoded = encode_documents(pairs, tokenizer=tokenizer, dtype=np.dtype("<u2"), advance=done.append)
    ids = [tokens for _, tokens in encoded]
    assert sum(done) == sum(map(len, texts))
    return ids


def test_vocabulary_has_the_asked_size_and_the_end_token_first(tokenizer):
    assert tokenizer.get_vocab_size() == 512
    assert tokenizer.token_to_id(END_OF_DOCUMENT) == 0


def test_training_is_deterministic_and_ignores_the_order_of_documents(documents):
    shuffled = random.Random(0).sample(documents, len(documents))
    trained = [train_tokenizer(given, vocab_size=512).to_str() for given in (documents, documents, shuffled)]
    assert trained[0] == trained[1] == trained[2]


def test_a_short_text_gives_a_smaller_vocabulary():
    assert train_tokenizer([document("ab ab")], vocab_size=4096).get_vocab_size() == 1 + 256 + 1 + 1


def test_training_sees_no_word_whose_length_squared_matters():
    parts = module.split_long_words("short " + "x" * 200_000 + " end")
    assert max(map(len, parts)) <= 4_000
    assert "".join(parts).count("x") > 190_000
    assert train_tokenizer([document("x" * 200_000)], vocab_size=300).get_vocab_size() < 300


def test_sample_is_bounded_and_drawn_by_hash(documents):
    limit = 20_000
    sample = module._sample(iter(documents), limit)
    assert 0 < sum(map(len, sample)) <= limit
    assert sorted(sample) == sorted(module._sample(reversed(documents), limit))
    assert module._sample([document("x" * 100)], 10) == ["x" * 10]


def test_encoding_is_lossless_and_ends_with_the_end_token(tokenizer, documents):
    texts = [documents[0].text, "", "na\N{LATIN SMALL LETTER I WITH DIAERESIS}ve \N{GRINNING FACE}\x00\t\r\n  end "]
    for text, ids in zip(texts, encode(tokenizer, texts), strict=True):
        assert ids.dtype == np.uint16
        assert ids[-1] == 0
        assert np.count_nonzero(ids == 0) == 1
        assert tokenizer.decode(ids[:-1].tolist()) == text


def test_text_that_spells_the_end_token_is_text(tokenizer):
    (ids,) = encode(tokenizer, [f"before{END_OF_DOCUMENT}after"])
    assert ids.tolist().index(0) == len(ids) - 1
    assert tokenizer.decode(ids[:-1].tolist()) == f"before{END_OF_DOCUMENT}after"


def test_cutting_long_texts_and_grouping_change_no_token(tokenizer, documents, monkeypatch):
    texts = [item.text for item in documents] + ["a\n\nb\n c\n\td\ne", "\n\n\n", "one line " * 50]
    whole = encode(tokenizer, texts)
    monkeypatch.setattr(module, "_PIECE_CHARACTERS", 40)
    monkeypatch.setattr(module, "_BATCH_CHARACTERS", 3000)
    assert len(module._pieces(texts[0])) > 5
    pieces = encode(tokenizer, texts)
    assert all(np.array_equal(a, b) for a, b in zip(whole, pieces, strict=True))


def test_documents_keep_their_split(tokenizer):
    pairs = [(side, document(side.value)) for side in (Split.train, Split.validation, Split.train)]
    encoded = encode_documents(pairs, tokenizer=tokenizer, dtype=np.dtype("<i4"), advance=lambda _: None)
    read = [(side, tokenizer.decode(ids[:-1].tolist())) for side, ids in encoded]
    assert read == [(side, side.value) for side, _ in pairs]
