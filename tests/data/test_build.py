import pytest
import torch

from nvfp4_train.config.batch import BatchConfig, RampConfig
from nvfp4_train.config.run import Device, RunConfig
from nvfp4_train.data.build import build_data
from nvfp4_train.data.error import DataError
from tests.support.token_files import GOLDEN_TEXT, text_config


def batch_config(**changes):
    fields = {"sequence_length": 64, "micro_batch_size": 2, "global_batch_size": 8}
    return BatchConfig(**(fields | changes), ramp=RampConfig(start=2, increment=2, tokens=0))


def run_config(*, seed=0, tokens=10_000):
    return RunConfig(name="run", dir="runs", seed=seed, tokens=tokens, stop_after_steps=None, device=Device.cpu)


@pytest.fixture(scope="module")
def cfg(tmp_path_factory):
    return text_config(tmp_path_factory.mktemp("build"), GOLDEN_TEXT, tokenizer_vocab_size=512)


def build(cfg, *, seed=0, vocab_size=512, **layout):
    return build_data(cfg, batch=batch_config(), run=run_config(seed=seed), vocab_size=vocab_size, **layout)


def test_facts(cfg):
    data = build(cfg)
    assert data.tokenizer_path.name == "tokenizer.json"
    assert data.tokenizer_path.is_file()
    assert data.vocab_size == 512
    assert data.num_sequences > 50_000 // 64
    assert list(data.validation) == ["text"]
    assert 0 < data.validation["text"].num_sequences < data.num_sequences
    assert data.metrics(data.num_sequences) == {"data/text/tokens": 64 * data.num_sequences, "data/text/epochs": 1}
    data.close()


def test_batches_of_two_ranks_are_those_of_one(cfg):
    step = {"first_sequence": 40, "num_sequences": 8}
    alone, *ranks = build(cfg), build(cfg, dp_rank=0, dp_degree=2), build(cfg, dp_rank=1, dp_degree=2)
    whole = alone.loader.step_batches(**step)
    parts = [rank.loader.step_batches(**step) for rank in ranks]
    for index, batch in enumerate(whole):
        part = parts[index % 2][index // 2]
        assert part.microbatch_index == batch.microbatch_index == index
        assert torch.equal(part.tokens, batch.tokens)
        assert torch.equal(part.document_ids, batch.document_ids)
    for data in (alone, *ranks):
        data.close()


def test_fingerprint_follows_the_data(cfg, tmp_path):
    same = [build(cfg), build(cfg, dp_degree=2), build(text_config(tmp_path, GOLDEN_TEXT, tokenizer_vocab_size=512))]
    other = build(text_config(tmp_path, GOLDEN_TEXT, tokenizer_vocab_size=500))
    assert len({data.fingerprint for data in same}) == 1
    assert other.fingerprint != same[0].fingerprint
    for data in (*same, other):
        data.close()


def test_seed_changes_the_training_order(cfg):
    built = [build(cfg, seed=seed) for seed in (0, 1)]
    first, second = (data.loader.step_batches(first_sequence=0, num_sequences=2)[0].tokens for data in built)
    assert not torch.equal(first, second)
    for data in built:
        data.close()


def test_validation_does_not_depend_on_the_seed(cfg):
    built = [build(cfg, seed=seed) for seed in (0, 1)]
    first, second = (next(data.validation["text"].batches(num_sequences=4, micro_batch_size=4)) for data in built)
    assert torch.equal(first.tokens, second.tokens)
    for data in built:
        data.close()


def test_tokenizer_larger_than_the_model_is_refused(cfg):
    with pytest.raises(ValueError, match=r"has 512 entries but model\.vocab_size is 511"):
        build(cfg, vocab_size=511)


def test_sequence_longer_than_the_data_is_refused(cfg):
    with pytest.raises(DataError, match="at least 100001, for one sequence"):
        build_data(cfg, batch=batch_config(sequence_length=100_000), run=run_config(), vocab_size=512)


def test_truncated_tokens_in_the_cache_are_refused(tmp_path):
    cfg = text_config(tmp_path, GOLDEN_TEXT)
    data = build(cfg)
    data.close()
    path = data.tokenizer_path.with_name("train.bin")
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match="a truncated file"):
        build(cfg)
