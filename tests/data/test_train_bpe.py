import pytest

from nvfp4_train.data.encoders.load import EncoderSpec, load_encoder
from nvfp4_train.data.error import DataError
from nvfp4_train.data.sources.open import SourceSpec
from nvfp4_train.data.staging import Staging
from nvfp4_train.data.tokenizing.job import OnError
from nvfp4_train.data.train_bpe import TrainJob, train_bpe
from tests.support.token_files import GOLDEN_TEXT


def train(tmp_path, path, **changes):
    options = {
        "source": SourceSpec(inputs=[str(path)]),
        "output": tmp_path / "new" / "tokenizer.json",
        "vocab_size": 300,
        "sample_characters": 20_000,
        "on_error": OnError.stop,
    }
    train_bpe(TrainJob(**(options | changes)), staging=Staging(tmp_path / "staging", max_bytes=0))
    return load_encoder(EncoderSpec(name=str(tmp_path / "new" / "tokenizer.json")))


def test_tokenizer_of_the_asked_size(tmp_path):
    encoder = train(tmp_path, GOLDEN_TEXT / "python_topics.jsonl")
    assert (encoder.vocab_size, encoder.end_of_document) == (300, 0)
    assert encoder.decode(encoder.encode(["some words"])[0].tolist()) == "some words"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["tokenizer.json"]


def test_existing_file_is_left_alone(tmp_path):
    train(tmp_path, GOLDEN_TEXT)
    with pytest.raises(DataError, match="no file of that name"):
        train(tmp_path, GOLDEN_TEXT)


def test_bad_records(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one two"}\nbroken\n')
    with pytest.raises(DataError, match="--on-error skip") as caught:
        train(tmp_path, path)
    assert caught.value.path == f"{path}:2"
    assert not (tmp_path / "new").exists()
    train(tmp_path, path, on_error=OnError.skip)
    assert "1 records were bad" in capsys.readouterr().out


def test_too_small_a_vocabulary_and_no_documents(tmp_path):
    with pytest.raises(DataError, match="at least 260"):
        train(tmp_path, GOLDEN_TEXT, vocab_size=259)
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(DataError, match="at least one document"):
        train(tmp_path, tmp_path / "a.jsonl")
