"""What a run reads does not depend on where it stopped, on ranks or on batches; other data are noticed."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4_train.config.indexed_data import FimConfig, MegatronOrderConfig, Order, Packing
from nvfp4_train.data.build import build_data
from nvfp4_train.data.error import DataError
from tests.support.blends import (
    LENGTH,
    VOCAB_SIZE,
    batch_config,
    indexed_config,
    phases,
    run_config,
    source_config,
    write_sources,
)

PHASES = phases((0.3, {"web": 0.9, "code": 0.1}), (0.6, {"web": 0.4, "code": 0.4, "math": 0.2}), (1.0, {"web": 1.0}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def prefixes(folder):
    return write_sources(folder)


@pytest.fixture(scope="module")
def configs(folder, prefixes):
    """One config of each kind of order, packing and blend."""
    plain = indexed_config(folder, prefixes)
    fim = {name: replace(source, fim_rate=0.5) for name, source in plain.sources.items()}
    tokens = FimConfig(prefix_token=997, middle_token=998, suffix_token=999, document_end_token=None)
    return {
        "plain": plain,
        "phases": replace(plain, phases=PHASES),
        "capped": replace(plain, sources=plain.sources | {"math": replace(plain.sources["math"], max_epochs=1.5)}),
        "best_fit": replace(plain, packing=Packing.best_fit, phases=PHASES),
        "fim": replace(plain, sources=fim, fim=tokens),
        "megatron": replace(
            plain,
            order=Order.megatron,
            megatron=MegatronOrderConfig(split="100,0,0", num_samples=300, extra_token=True),
        ),
    }


def open_data(cfg, *, micro=1, size=4, rank=0, degree=1, run=None, length=LENGTH):
    return build_data(
        cfg,
        batch=batch_config(micro=micro, size=size, length=length),
        run=run or run_config(),
        vocab_size=VOCAB_SIZE,
        dp_rank=rank,
        dp_degree=degree,
    )


def rows_of(batches):
    ordered = sorted(batches, key=lambda batch: batch.microbatch_index)
    fields = ("tokens", "labels", "document_ids", "position_ids")
    return list(zip(*(torch.cat([getattr(batch, name) for batch in ordered]).tolist() for name in fields), strict=True))


def uninterrupted(cfg, sequences):
    data = open_data(cfg)
    rows = rows_of(data.loader.step_batches(first_sequence=0, num_sequences=sequences))
    data.close()
    return rows


plans = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=4)


@pytest.mark.parametrize("kind", ["plain", "phases", "capped", "best_fit", "fim", "megatron"])
@settings(max_examples=5, deadline=None)
@given(plan=plans)
def test_whatever_stops_and_restarts_it_a_run_reads_the_uninterrupted_stream(configs, kind, plan):
    """Each entry is a start of the run: its microbatch size, its ranks, and the microbatches of each rank in a step."""
    read, position, saved = [], 0, None
    for micro, degree, each in plan:
        count = micro * degree * each
        states = []
        batches = []
        for rank in range(degree):
            data = open_data(configs[kind], micro=micro, size=count, rank=rank, degree=degree)
            if saved is not None:
                assert data.changes(json.loads(json.dumps(saved)), sequences=position) == []
            batches += data.loader.step_batches(first_sequence=position, num_sequences=count)
            states.append(data.state(position + count))
            data.close()
        assert all(state == states[0] for state in states)  # a checkpoint knows nothing of ranks
        read += rows_of(batches)
        position, saved = position + count, states[0]
    assert read == uninterrupted(configs[kind], position)


@pytest.mark.parametrize("kind", ["plain", "phases", "capped", "best_fit", "fim"])
def test_cursors_say_what_was_read(configs, kind):
    data = open_data(configs[kind])
    state = data.state(120)
    cursors = {name: source["tokens"] for name, source in state["sources"].items()}
    assert sum(cursors.values()) == 120 * LENGTH
    metrics = data.metrics(120)
    assert {name: metrics[f"data/{name}/tokens"] for name in cursors} == cursors
    if kind in ("plain", "phases"):
        rows = rows_of(data.loader.step_batches(first_sequence=0, num_sequences=120))
        web = sum(tokens[0] < 403 for tokens, *_ in rows)
        assert web * LENGTH == cursors["web"]
        assert metrics["data/web/epochs"] == web / 50
    data.close()


def test_each_epoch_of_each_source_is_a_permutation(configs):
    data = open_data(configs["plain"], run=run_config(sequences=600))
    rows = rows_of(data.loader.step_batches(first_sequence=0, num_sequences=600))
    for first, size, epoch in ((0, 403, 50), (403, 151, 18), (554, 61, 7)):
        starts = [tokens[0] - first for tokens, *_ in rows if first <= tokens[0] < first + size]
        for begin in range(0, len(starts) - epoch, epoch):
            assert sorted(starts[begin : begin + epoch]) == list(range(0, epoch * LENGTH, LENGTH))
    data.close()


def test_a_longer_run_starts_as_the_shorter_one(configs):
    short, long = (open_data(configs["plain"], run=run_config(sequences=count)) for count in (100, 1000))
    saved = short.state(100)
    assert long.changes(saved, sequences=100) == []
    rows = [rows_of(data.loader.step_batches(first_sequence=0, num_sequences=100)) for data in (short, long)]
    assert rows[0] == rows[1]
    short.close()
    long.close()


def stopped(configs, kind="plain", at=60):
    data = open_data(configs[kind])
    saved = data.state(at)
    data.close()
    return json.loads(json.dumps(saved))


def changes_of(cfg, saved, *, at=60, **options):
    data = open_data(cfg, **options)
    changes = data.changes(saved, sequences=at)
    data.close()
    return changes


def test_other_content_under_the_same_path_is_noticed(configs, tmp_path):
    cfg = indexed_config(tmp_path, write_sources(tmp_path))
    data = open_data(cfg)
    saved = data.state(60)
    data.close()
    content = bytearray((tmp_path / "web.bin").read_bytes())
    content[100] ^= 1
    (tmp_path / "web.bin").write_bytes(content)
    (change,) = changes_of(cfg, saved)
    assert change.startswith(f"source web: its fingerprint was {saved['sources']['web']['fingerprint']} and is ")


def test_moved_files_are_the_same(configs, tmp_path):
    assert changes_of(indexed_config(tmp_path, write_sources(tmp_path)), stopped(configs)) == []


def test_other_length_seed_or_packing_are_noticed(configs):
    saved = stopped(configs)
    for options in ({"length": 4}, {"run": run_config(seed=6)}):
        assert len(changes_of(configs["plain"], saved, **options)) == 3
    assert len(changes_of(replace(configs["plain"], packing=Packing.best_fit), saved)) == 3


def test_other_weights_are_noticed_and_the_future_may_change(configs):
    cfg = configs["phases"]
    saved = stopped(configs, "phases", at=100)  # in the second phase
    later = phases(
        (0.3, {"web": 0.9, "code": 0.1}), (0.6, {"web": 0.4, "code": 0.4, "math": 0.2}), (1.0, {"math": 1.0})
    )
    assert changes_of(replace(cfg, phases=later), saved, at=100) == []
    earlier = phases(
        (0.3, {"web": 0.5, "code": 0.5}), (0.6, {"web": 0.4, "code": 0.4, "math": 0.2}), (1.0, {"web": 1.0})
    )
    assert changes_of(replace(cfg, phases=earlier), saved, at=100) == [
        "source web: 560 tokens were read, and this blend would have read 368",
        "source code: 176 tokens were read, and this blend would have read 368",
    ]


def test_a_longer_budget_that_moves_a_phase_that_is_over_is_noticed(configs):
    saved = stopped(configs, "phases", at=100)
    assert changes_of(configs["phases"], saved, at=100, run=run_config(sequences=400)) != []


def test_a_source_may_come_and_one_that_was_not_read_may_go(configs, folder, prefixes):
    two = replace(configs["plain"], sources={name: configs["plain"].sources[name] for name in ("web", "code")})
    early = phases((0.5, {"web": 0.7, "code": 0.3}), (1.0, {"web": 0.5, "math": 0.5}))
    three = replace(configs["plain"], phases=early)
    before = open_data(replace(two, phases=phases((1.0, {"web": 0.7, "code": 0.3}))))
    saved = before.state(60)
    before.close()
    assert changes_of(three, saved) == []
    gone = replace(two, sources={"web": two.sources["web"]})
    assert changes_of(gone, saved) == ["source code: 144 tokens were read from it, and it is gone"]


def test_a_new_phase_goes_on_with_sources_that_are_the_same(configs, folder, prefixes):
    saved = stopped(configs, at=60)
    cursors = {name: source["tokens"] for name, source in saved["sources"].items()}
    assert cursors == {"web": 288, "code": 144, "math": 48}
    sources = {
        "code": source_config(prefixes["code"], weight=1.0),
        "web": source_config(prefixes["web"], weight=1.0),
        "more": source_config(prefixes["math"], weight=1.0),  # another name: another source
    }
    data = open_data(replace(configs["plain"], sources=sources))
    assert data.changes(saved, sequences=60) == ["source math: 48 tokens were read from it, and it is gone"]
    assert data.begin_phase(saved, tokens=480) == {"code": 144, "web": 288, "more": 0}
    rows = rows_of(data.loader.step_batches(first_sequence=0, num_sequences=30))
    after = [tokens[0] for tokens, *_ in rows]
    # The rest of the epochs that the first phase began, and nothing of what it read.
    first = [tokens[0] for tokens, *_ in uninterrupted(configs["plain"], 60)]
    assert not {token for token in first if token < 403} & set([token for token in after if token < 403][: 50 - 36])
    state = data.state(30)
    assert state["origin"] == {"tokens": 480, "sources": {"code": 144, "web": 288}}
    assert sum(source["tokens"] for source in state["sources"].values()) == 144 + 288 + 30 * LENGTH
    data.close()
    # The new phase itself resumes exactly.
    again = open_data(replace(configs["plain"], sources=sources))
    assert again.changes(json.loads(json.dumps(state)), sequences=30) == []
    follows = rows_of(again.loader.step_batches(first_sequence=30, num_sequences=12))
    whole = open_data(replace(configs["plain"], sources=sources))
    whole.begin_phase(saved, tokens=480)
    assert follows == rows_of(whole.loader.step_batches(first_sequence=0, num_sequences=42))[30:]
    again.close()
    whole.close()


def test_a_new_phase_needs_sources_for_the_rest_of_the_run_only(configs):
    saved = stopped(configs, at=60)
    run = run_config(sequences=130)
    # Rows that are left: 14 of web, none of code (its 18 were read), and 7 of a source that is new.
    sources = {name: replace(configs["plain"].sources[name], max_epochs=1.0) for name in ("web", "code")}
    sources["new"] = replace(configs["plain"].sources["math"], max_epochs=9.0)
    data = open_data(replace(configs["plain"], sources=sources), run=run)
    data.begin_phase(saved, tokens=60 * LENGTH)
    data.check_lasts(run=run, batch=batch_config(size=7))  # 14 + 63 = 77 rows for 70
    longer = run_config(sequences=138)
    with pytest.raises(DataError, match=rf"after {(60 + 77) * LENGTH} tokens of the run"):
        data.check_lasts(run=longer, batch=batch_config(size=1))
    data.close()


def test_phases_count_tokens_of_the_run_after_a_new_phase_too(configs):
    saved = stopped(configs, at=60)
    switched = phases((0.5, {"web": 1.0}), (1.0, {"code": 1.0}))  # at sequence 100 of the run
    data = open_data(replace(configs["plain"], phases=switched))
    assert data.changes(saved, sequences=60) != []
    data.begin_phase(saved, tokens=60 * LENGTH)
    rows = rows_of(data.loader.step_batches(first_sequence=0, num_sequences=60))
    assert [tokens[0] < 403 for tokens, *_ in rows] == [True] * 40 + [False] * 20
    data.close()
