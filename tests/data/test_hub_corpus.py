import shutil
from pathlib import Path

import pytest

from nvfp4_train.config.hub_data import HubDataConfig
from nvfp4_train.config.load import load_config
from nvfp4_train.data import hub_corpus
from nvfp4_train.data.error import DataError
from nvfp4_train.data.indexed import IndexedTokens
from nvfp4_train.data.prepare import prepare_data
from nvfp4_train.data.split import Split
from nvfp4_train.data.tokenizer import load_tokenizer
from nvfp4_train.data.tokenizing import job
from tests.support.text_sources import write_parquet
from tests.support.tokenizer_files import write_huggingface, write_sentencepiece

datasets = pytest.importorskip("datasets")
TEXTS = [
    f"An educational page, number {number}. " + "Plants turn light into sugar. " * (number % 9) for number in range(400)
]


@pytest.fixture
def folder(tmp_path):
    """Local parquet files with the columns of FineWeb-Edu."""
    root = tmp_path / "fineweb_edu"
    root.mkdir()
    write_parquet(root / "000_00000.parquet", TEXTS[:250], group_rows=100)
    write_parquet(root / "001_00000.parquet", TEXTS[250:], group_rows=100)
    return root


def config(tmp_path, folder, **changes) -> HubDataConfig:
    """The shipped YAML, made small and pointed at local files."""
    options = {
        "dataset": folder, "subset": "''", "cache_dir": tmp_path / "cache", "validation_fraction": 0.1,
        "tokenizer_vocab_size": 300, "tokenizer_characters": 20_000, "max_tokens": 0, "shard_tokens": 3000,
        "num_workers": 1,
    } | changes  # fmt: skip
    return load_config(["data=fineweb_edu", *(f"data.{key}={value}" for key, value in options.items())]).cfg.data


def decoded(prepared, split):
    tokenizer = load_tokenizer(prepared.tokenizer_path)
    pairs = [IndexedTokens(prefix) for prefix in prepared.prefixes(split)]
    return [tokenizer.decode(document[:-1].tolist()) for pair in pairs for document in pair.documents()]


def test_every_page_is_in_one_split_and_in_order(tmp_path, folder):
    prepared = prepare_data(config(tmp_path, folder))
    sides = {split: decoded(prepared, split) for split in Split}
    assert len(sides[Split.train]) + len(sides[Split.validation]) == 400
    for texts in sides.values():
        assert texts == [text for text in TEXTS if text in set(texts)]
    assert len(prepared.prefixes(Split.train)) > 2
    manifest = prepared.manifest
    assert manifest.vocab_size == 300
    for split in Split:
        pairs = [IndexedTokens(prefix) for prefix in prepared.prefixes(split)]
        assert sum(pair.num_tokens for pair in pairs) == manifest.num_tokens[split.value]
        assert all(pair.num_tokens >= 3000 for pair in pairs[:-1])


def test_prepared_shards_need_no_dataset(tmp_path, folder, monkeypatch):
    cfg = config(tmp_path, folder)
    first = prepare_data(cfg)
    monkeypatch.setattr(hub_corpus, "HubSource", None)
    monkeypatch.setattr(job, "open_source", None)
    assert prepare_data(cfg) == first


def test_streaming_or_not_gives_the_same_tokens(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    streamed = prepare_data(config(tmp_path, folder))
    # Another cache, since the key does not hold how the text came here.
    stored = prepare_data(config(tmp_path, folder, streaming="false", cache_dir=tmp_path / "other"))
    assert stored.manifest == streamed.manifest


def test_budget_of_tokens(tmp_path, folder):
    prepared = prepare_data(config(tmp_path, folder, max_tokens=5000))
    assert 5000 <= sum(prepared.manifest.num_tokens.values()) < 5500


def test_a_killed_preparation_goes_on(tmp_path, folder, monkeypatch):
    whole = prepare_data(config(tmp_path, folder))
    shutil.rmtree(tmp_path / "cache")
    trained = []
    train = hub_corpus.train_tokenizer
    monkeypatch.setattr(hub_corpus, "train_tokenizer", lambda *a, **o: trained.append(1) or train(*a, **o))
    with monkeypatch.context() as patched:

        def killed(*arguments):
            raise KeyboardInterrupt

        patched.setattr(hub_corpus, "_write_manifest", killed)
        with pytest.raises(KeyboardInterrupt):
            prepare_data(config(tmp_path, folder))
    assert prepare_data(config(tmp_path, folder)) == whole
    assert trained == [1]


def test_own_tokenizer(tmp_path, folder):
    path = write_huggingface(tmp_path / "own" / "tokenizer.json", vocab_size=280)
    for given in (path, path.parent):
        prepared = prepare_data(config(tmp_path, folder, tokenizer=given))
        assert prepared.manifest.vocab_size == 280
        assert prepared.tokenizer_path.read_bytes() == path.read_bytes()
    with pytest.raises(DataError, match=r"a tokenizer\.json of Hugging Face"):
        prepare_data(config(tmp_path, folder, tokenizer=write_sentencepiece(tmp_path / "a.model")))


def test_changed_options_or_files_are_prepared_again(tmp_path, folder):
    fingerprints = [
        prepare_data(config(tmp_path, folder, **changes)).manifest.fingerprint
        for changes in ({}, {"tokenizer_vocab_size": 290}, {"shard_tokens": 4000})
    ]
    write_parquet(folder / "002_00000.parquet", ["one more page"])
    fingerprints.append(prepare_data(config(tmp_path, folder)).manifest.fingerprint)
    assert len(set(fingerprints)) == 4


def test_too_few_documents_for_both_splits(tmp_path):
    (tmp_path / "small").mkdir()
    write_parquet(tmp_path / "small" / "a.parquet", ["one page"])
    with pytest.raises(DataError, match=r"data\.validation_fraction"):
        prepare_data(config(tmp_path, tmp_path / "small", validation_fraction=0.0001))


def test_without_a_network_the_error_says_so(tmp_path):
    with pytest.raises(DataError, match="check name, subset, split and the network"):
        prepare_data(config(tmp_path, Path("org/name-that-is-not-there")))
