from dataclasses import replace

import pytest

from nvfp4_train.config.indexed_data import MegatronOrderConfig, OnChange, Order, Packing, is_split
from nvfp4_train.config.load import from_yaml, load_config
from tests.support.configs import composed, load_problems, problems_of

BASE = (
    "data=indexed",
    "data.sources={web: {paths: [a, b], weight: 0.7}, code: {paths: [c], weight: 0.3}}",
    "data.validation={web: {paths: [d]}}",
)
VALID = composed(*BASE).data


def test_names_are_the_users():
    loaded = load_config(
        [*BASE, "data.sources.code.max_epochs=4", "data.phases.first={end_fraction: 0.7, weights: {web: 1}}",
         "data.phases.last.end_fraction=1", "data.phases.last.weights.code=1", "data.validation.code.paths=[e]"]
    )  # fmt: skip
    data = loaded.cfg.data
    assert list(data.sources) == ["web", "code"]
    assert data.sources["web"].paths == ["a", "b"]
    assert data.sources["code"].max_epochs == 4
    assert list(data.phases) == ["first", "last"]
    assert data.phases["last"].weights == {"code": 1.0}
    assert data.validation["code"].paths == ["e"]
    assert from_yaml(loaded.yaml) == loaded.cfg


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"cache_dir": ""}, "cache_dir"),
        ({"prefetch": -1}, "prefetch"),
        ({"pad_token": -1}, "pad_token"),
        ({"staging_gib": 0.0}, "staging_gib"),
        ({"sources": {}}, "sources"),
        ({"validation": {}}, "validation"),
        ({"order": Order.megatron, "packing": Packing.best_fit}, "packing"),
        ({"order": Order.megatron, "on_change": OnChange.new_phase}, "on_change"),
        (
            {"order": Order.megatron, "sources": {"a": replace(VALID.sources["web"], max_epochs=1.0)}},
            "sources.a.max_epochs",
        ),
        (
            {
                "order": Order.megatron,
                "sources": {name: replace(some, weight=None) for name, some in VALID.sources.items()},
            },
            "sources",
        ),
    ],
)
def test_a_violated_rule_names_its_key(changes, key):
    assert [problem.key for problem in problems_of(lambda: replace(VALID, **changes))] == [key]


def test_fim_needs_its_tokens():
    sources = {"web": replace(VALID.sources["web"], fim_rate=0.5)}
    found = [problem.key for problem in problems_of(lambda: replace(VALID, sources=sources))]
    assert found == ["fim.prefix_token", "fim.middle_token", "fim.suffix_token"]


def test_megatrons_split_makes_validation_sets_of_the_sources():
    split = replace(VALID.megatron, split="90,10,0")
    megatron = replace(VALID, order=Order.megatron, megatron=split, validation={})
    assert megatron.validation == {}
    both = problems_of(lambda: replace(megatron, validation=VALID.validation))
    assert [problem.key for problem in both] == ["validation.web"]


@pytest.mark.parametrize("text", ["", "90,10", "0,90,10", "90,-5,15", "90,nan,10", "a,b,c"])
def test_what_is_no_split(text):
    assert not is_split(text)
    found = problems_of(lambda: MegatronOrderConfig(split=text, num_samples=None, extra_token=True))
    assert [problem.key for problem in found] == ["split"]


def test_shares_of_a_split():
    assert MegatronOrderConfig(split="969, 30, 1", num_samples=None, extra_token=True).shares() == [969, 30, 1]


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        (["data.sources.web.weight=nan"], {"data.sources.web.weight"}),
        (["data.sources.web.weight=-1"], {"data.sources.web.weight"}),
        (["data.sources.web.wieght=1"], {"data.sources.web.wieght"}),
        (["data.phases.a={end_fraction: 0.7}"], {"data.phases.a"}),
        (["data.phases.a={end_fraction: 1, weights: {wbe: 1}}"], {"data.phases.a"}),
        (["data.phases.a={end_fraction: 1, weights: [1]}"], {"data.phases.a.weights"}),
        (["data.phases.a=1"], {"data.phases.a"}),
        (["data.pad_token=4096"], {"data.pad_token"}),
        (["data.order=random"], {"data.order"}),
        # All of them at once.
        (
            ["data.sources.web.weight=nan", "data.phases.a={end_fraction: 0.7}", "data.prefetch=-1"],
            {"data.sources.web.weight", "data.phases.a", "data.prefetch"},
        ),
    ],
)
def test_mistakes_on_the_command_line(overrides, found):
    assert set(load_problems(*BASE, "model.vocab_size=4096", *overrides)) == found


def test_a_plan_that_does_not_cover_the_run_says_how_to():
    problem = load_problems(*BASE, "run.tokens=1000", "data.phases.a={end_tokens: 999}")["data.phases.a"]
    assert problem.value == "an end at 999"
    assert "the last one must reach run.tokens (1000)" in problem.rule
    assert problem.fix == "data.phases.a.end_fraction=1 data.phases.a.end_tokens=null"
