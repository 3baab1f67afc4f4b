import json

import pytest
from tokenizers import Tokenizer, processors

from nvfp4_train.data.encoders.hugging_face import HuggingFaceEncoder
from nvfp4_train.data.error import DataError
from tests.support.tokenizer_files import write_huggingface


def encoder(path):
    return HuggingFaceEncoder(path, name=str(path))


@pytest.fixture
def path(tmp_path):
    return write_huggingface(tmp_path / "tokenizer.json")


def test_truncation_padding_and_added_tokens_of_the_file_are_not_applied(path):
    plain = encoder(path).encode(["some words, again and again", "x"])
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.save(str(path))
    changed = encoder(path).encode(["some words, again and again", "x"])
    assert [ids.tolist() for ids in changed] == [ids.tolist() for ids in plain]
    assert len(plain[0]) > 8


def test_vocabulary_reaches_to_the_largest_id(path):
    tokenizer = Tokenizer.from_file(str(path))
    size = tokenizer.get_vocab_size()
    values = json.loads(tokenizer.to_str())
    values["added_tokens"].append({**values["added_tokens"][0], "id": 1000, "content": "<|far|>"})
    path.write_text(json.dumps(values))
    assert encoder(path).vocab_size >= size + 1
    assert encoder(path).special_id("<|far|>") == encoder(path).vocab_size - 1


@pytest.mark.parametrize("end", ["</s>", "<|end_of_text|>", "<eos>"])
def test_known_names_of_the_end_are_found(tmp_path, end):
    assert encoder(write_huggingface(tmp_path / "tokenizer.json", end=end)).end_of_document == 0


@pytest.mark.parametrize("token", ["<|mine|>", {"content": "<|mine|>", "special": True}])
def test_the_config_beside_it_names_the_end(tmp_path, token):
    path = write_huggingface(tmp_path / "tokenizer.json", end="<|mine|>")
    assert encoder(path).end_of_document is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
    assert encoder(path).end_of_document == 0


def test_config_without_an_end(path):
    (path.parent / "tokenizer_config.json").write_text('{"eos_token": null}')
    assert encoder(path).end_of_document == 0  # the name that everybody uses
    (path.parent / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(DataError, match="no JSON object"):
        encoder(path)


def test_file_that_is_no_tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="no tokenizer"):
        encoder(tmp_path / "tokenizer.json")


def test_digest_follows_the_content(tmp_path, path):
    same = write_huggingface(tmp_path / "other" / "tokenizer.json")
    other = write_huggingface(tmp_path / "small" / "tokenizer.json", vocab_size=290)
    assert encoder(path).digest == encoder(same).digest != encoder(other).digest
