import pytest

from nvfp4_train.config.command import Command, parse_command
from tests.support.configs import problems_of


@pytest.mark.parametrize(
    ("words", "shows_help", "shows_config"),
    [
        ([], False, False),
        (["-h"], True, False),
        (["--help"], True, False),
        (["--cfg", "job"], False, True),
        (["--cfg=job"], False, True),
        (["-c", "job", "--resolve"], False, True),
    ],
)
def test_flags_stand_anywhere_among_overrides(words, shows_help, shows_config):
    command = parse_command(["experiment=demo", *words, "model.pattern=-M"])
    overrides = ["experiment=demo", "model.pattern=-M"]
    assert command == Command(overrides=overrides, shows_help=shows_help, shows_config=shows_config)


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("--hlep", "did you mean --help?"),
        ("--run.name=x", "keys have no dashes: run.name=x"),
        ("-m", "flags: "),
        ("--resolve", "write --cfg job"),
    ],
)
def test_unknown_flags_have_a_fix(word, fix):
    (problem,) = problems_of(lambda: parse_command([word]))
    assert problem.key == word
    assert problem.fix.startswith(fix)


@pytest.mark.parametrize("words", [["--cfg"], ["--cfg", "hydra"], ["--cfg=all"]])
def test_only_the_job_is_printed(words):
    assert [problem.key for problem in problems_of(lambda: parse_command(words))] == ["--cfg"]


def test_all_unknown_flags_are_reported():
    assert [problem.key for problem in problems_of(lambda: parse_command(["-x", "a=1", "-y"]))] == ["-x", "-y"]
