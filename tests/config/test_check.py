import pytest

from nvfp4_train.config import check
from nvfp4_train.config.check import compositions, main
from nvfp4_train.config.load import default_choices
from nvfp4_train.config.tree import group_choices


@pytest.mark.slow  # `make check` does it
def test_every_yaml_composes(capsys):
    assert main() == 0
    assert capsys.readouterr().out.count("ok  ") == len(compositions())


def test_every_choice_that_is_not_the_default_is_composed_with_every_experiment():
    used = [set(overrides) for overrides in compositions()]
    groups = group_choices()
    assert set() in used
    for experiment in groups.pop("experiment"):
        assert {f"experiment={experiment}"} in used
        for group, choices in groups.items():
            others = set(choices) - {default_choices()[group]}
            assert all({f"experiment={experiment}", f"{group}={choice}"} in used for choice in others)


def test_main_prints_a_line_each(monkeypatch, capsys):
    monkeypatch.setattr(check, "compositions", lambda: [[], ["recipe=bf16"]])
    assert main() == 0
    assert capsys.readouterr().out.splitlines() == [
        "ok     (defaults)",
        "ok     recipe=bf16",
        "2/2 configurations compose",
    ]


def test_main_fails_with_the_problems(monkeypatch, capsys):
    monkeypatch.setattr(check, "compositions", lambda: [["recipe=bf17"], []])
    assert main() == 1
    output = capsys.readouterr().out
    assert "wrong  recipe=bf17" in output
    assert "did you mean bf16?" in output
    assert "1/2 configurations compose" in output
