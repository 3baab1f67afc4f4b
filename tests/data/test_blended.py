import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from nvfp4_train.config.blend import PhaseConfig, ValidationConfig
from nvfp4_train.config.indexed_data import MegatronOrderConfig, Order, Packing
from nvfp4_train.data.batch import IGNORE_INDEX
from nvfp4_train.data.build import build_data
from nvfp4_train.data.error import DataError
from tests.support.blends import LENGTH, VOCAB_SIZE, batch_config, indexed_config, phases, run_config, write_sources
from tests.support.token_files import GOLDEN_PAIRS, write_pair

BORDERS = {"web": (0, 403), "code": (403, 554), "math": (554, 615)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("blended")


@pytest.fixture(scope="module")
def prefixes(folder):
    return write_sources(folder)


@pytest.fixture
def cfg(folder, prefixes):
    return indexed_config(folder, prefixes)


def read(cfg, count, *, run=None, batch=None):
    data = build_data(cfg, batch=batch or batch_config(), run=run or run_config(), vocab_size=VOCAB_SIZE)
    batches = data.loader.step_batches(first_sequence=0, num_sequences=count)
    data.close()
    return torch.cat([one.tokens for one in batches]).numpy(), torch.cat([one.labels for one in batches]).numpy()


def names(tokens):
    return [name for token in tokens[:, 0] for name, (first, last) in BORDERS.items() if first <= token < last]


def shares(tokens):
    found = names(tokens)
    return {name: found.count(name) / len(found) for name in BORDERS}


def test_a_blend_has_its_weights_at_every_point(cfg):
    found = names(read(cfg, 200)[0])
    for end in range(1, 201):
        for name, weight in (("web", 0.6), ("code", 0.3), ("math", 0.1)):
            assert abs(found[:end].count(name) - weight * end) <= 0.5 + 3 * weight / 2


def test_without_weights_every_token_is_read_as_often(cfg):
    sources = {name: replace(source, weight=None) for name, source in cfg.sources.items()}
    found = shares(read(replace(cfg, sources=sources), 400)[0])
    assert found["web"] == pytest.approx(403 / 615, abs=0.005)


def test_tokens_are_weights(cfg):
    sources = {name: replace(source, weight=None, tokens=800) for name, source in cfg.sources.items()}
    assert set(shares(read(replace(cfg, sources=sources), 300)[0]).values()) == {1 / 3}


def test_phases_switch_at_their_fraction_of_the_run(cfg):
    # The three phases of the paper's 12B model, at 70 % and 90 %.
    three = phases((0.7, {"web": 1.0}), (0.9, {"code": 1.0}), (1.0, {"math": 1.0}))
    found = names(read(replace(cfg, phases=three), 200)[0])
    assert found == ["web"] * 140 + ["code"] * 40 + ["math"] * 20


def test_phases_switch_at_their_token_and_keep_own_weights(cfg):
    two = {"a": PhaseConfig(end_tokens=50 * LENGTH, tokens={"math": 400}), "b": PhaseConfig(end_fraction=1.0)}
    found = names(read(replace(cfg, phases=two), 150)[0])
    assert found[:50] == ["math"] * 50
    assert found[50:].count("web") == 60


def test_a_phase_ends_inside_a_row_after_that_row(cfg):
    two = {"a": PhaseConfig(end_tokens=3 * LENGTH + 1, weights={"math": 1.0}), "b": PhaseConfig(end_fraction=1.0)}
    assert names(read(replace(cfg, phases=two), 8)[0])[:5] == ["math"] * 4 + ["web"]


def test_no_source_is_read_more_often_than_it_may_be(cfg):
    sources = cfg.sources | {"math": replace(cfg.sources["math"], max_epochs=2.0)}
    found = names(read(replace(cfg, sources=sources), 200)[0])
    assert found.count("math") == 14
    later = found[150:]
    assert later.count("web") == pytest.approx(50 * 2 / 3, abs=1)


def test_sources_that_end_before_the_run_are_refused(cfg):
    sources = {name: replace(source, max_epochs=1.0) for name, source in cfg.sources.items()}

    def check(sequences, *, size):
        run, batch = run_config(sequences=sequences), batch_config(size=size)
        data = build_data(replace(cfg, sources=sources), batch=batch, run=run, vocab_size=VOCAB_SIZE)
        data.close()
        data.check_lasts(run=run, batch=batch)

    check(75, size=5)  # as many rows are there
    for sequences, size in ((76, 4), (74, 7)):  # the last step of 7 needs 77
        with pytest.raises(DataError, match=r"often as it may be after 600 tokens of the run\n.*until run\.tokens"):
            check(sequences, size=size)


def test_reading_behind_the_end_of_all_sources_is_an_error_too(cfg):
    sources = {name: replace(source, max_epochs=1.0) for name, source in cfg.sources.items()}
    with pytest.raises(DataError, match="after 600 tokens"):
        read(replace(cfg, sources=sources), 76)


def test_a_source_without_loss_is_read_and_not_trained_on(cfg):
    sources = cfg.sources | {"code": replace(cfg.sources["code"], loss=False)}
    tokens, labels = read(replace(cfg, sources=sources), 100)
    plain, plain_labels = read(cfg, 100)
    assert np.array_equal(tokens, plain)
    code = np.asarray([name == "code" for name in names(tokens)])
    assert np.all(labels[code] == IGNORE_INDEX)
    assert np.array_equal(labels[~code], plain_labels[~code])


def test_seed_and_source_have_orders_of_their_own(cfg, prefixes):
    twins = replace(cfg, sources={"a": cfg.sources["math"], "b": cfg.sources["math"]})
    tokens, _ = read(twins, 14)
    assert tokens[::2, 0].tolist() != tokens[1::2, 0].tolist()
    assert sorted(tokens[::2, 0].tolist()) == sorted(tokens[1::2, 0].tolist())
    assert not np.array_equal(read(cfg, 50)[0], read(cfg, 50, run=run_config(seed=6))[0])


def test_best_fit_rows_come_from_the_cache_folder(cfg, folder):
    tokens, labels = read(replace(cfg, packing=Packing.best_fit, pad_token=999), 60)
    assert list((folder / "cache").glob("best_fit_*/rows.bin"))
    assert np.all(labels[tokens == 999] == IGNORE_INDEX)
    assert (tokens == 999).mean() < 0.2


def test_the_golden_blend_is_read_in_megatrons_order(cfg, tmp_path):
    golden = np.load(GOLDEN_PAIRS / "blend_A0.7_B0.3_train.npz")
    sources = {
        "a": replace(cfg.sources["web"], paths=[str(GOLDEN_PAIRS / "docsA_uint16")], weight=0.7),
        "b": replace(cfg.sources["web"], paths=[str(GOLDEN_PAIRS / "docsB_int32")], weight=0.3),
    }
    megatron = replace(
        cfg,
        cache_dir=str(tmp_path),
        sources=sources,
        validation={},
        order=Order.megatron,
        megatron=MegatronOrderConfig(split="95,5,0", num_samples=500, extra_token=True),
    )
    data = build_data(
        megatron,
        batch=batch_config(length=64),
        run=run_config(sequences=496, seed=1234, length=64),
        vocab_size=131072,
    )
    batches = data.loader.step_batches(first_sequence=0, num_sequences=4)
    for index, batch in enumerate(batches):
        assert batch.tokens[0].tolist() == golden[f"sample{index}.tokens"].tolist()
    assert data.state(500)["sources"]["a"]["tokens"] == 350 * 64
    assert data.metrics(500)["data/a/epochs"] > 1
    assert list(data.validation) == ["a", "b"]
    data.close()


def test_megatrons_order_of_one_source_asks_for_the_samples_of_the_run(cfg):
    alone = replace(cfg, sources={"web": cfg.sources["web"]}, order=Order.megatron)
    data = build_data(alone, batch=batch_config(size=3), run=run_config(sequences=100), vocab_size=VOCAB_SIZE)
    # 34 steps of 3 sequences: 102 samples of 8 tokens and one more token, in 3 epochs of 403.
    rows = data.loader.step_batches(first_sequence=99, num_sequences=3)
    assert len(rows) == 3
    assert data.state(102)["sources"]["web"]["tokens"] == 102 * LENGTH
    data.close()


def test_validation_sets_have_their_names_and_do_not_depend_on_the_seed(cfg, prefixes):
    sets = {
        "one": ValidationConfig(paths=[str(prefixes["code"])]),
        "two": ValidationConfig(paths=[str(prefixes["math"])]),
    }
    first, second = (
        build_data(
            replace(cfg, validation=sets), batch=batch_config(), run=run_config(seed=seed), vocab_size=VOCAB_SIZE
        )
        for seed in (1, 2)
    )
    assert {name: some.num_sequences for name, some in first.validation.items()} == {"one": 18, "two": 7}
    tokens = [
        next(data.validation["one"].batches(num_sequences=4, micro_batch_size=4)).tokens for data in (first, second)
    ]
    assert torch.equal(*tokens)
    first.close()
    second.close()


def test_an_empty_source_is_refused(cfg, tmp_path):
    write_pair(tmp_path / "empty", [])
    sources = cfg.sources | {"nothing": replace(cfg.sources["web"], paths=[str(tmp_path / "empty")])}
    with pytest.raises(DataError, match="an empty source"):
        read(replace(cfg, sources=sources), 4)


def test_memory_does_not_grow_with_the_run(cfg):
    # 10^15 tokens: no list of its samples could be made.
    data = build_data(cfg, batch=batch_config(), run=run_config(sequences=10**14), vocab_size=VOCAB_SIZE)
    data.loader.step_batches(first_sequence=10**14 - 4, num_sequences=4)
    epochs = data.metrics(10**14)["data/web/epochs"]
    assert math.isclose(epochs, 0.6 * 10**14 / 50, rel_tol=1e-6)
    data.close()
