"""The command line of the training program: flags, and the overrides among them."""

from dataclasses import dataclass

from nvfp4_train.config.problem import NO_VALUE, Problem, require
from nvfp4_train.config.suggest import closest

FLAGS = {
    "--help": "show this text (-h)",
    "--cfg job": "print the composed configuration as YAML, resolved and checked, and stop (-c job)",
    "--resolve": "accepted beside --cfg, as Hydra does; values are always resolved",
}


@dataclass(frozen=True, kw_only=True)
class Command:
    """What the command line asks for.

    Args:
        overrides: ``group=choice`` and ``key=value``.
        shows_help: Whether to print the help and stop.
        shows_config: Whether to print the composed configuration and stop.
    """

    overrides: list[str]
    shows_help: bool
    shows_config: bool


def parse_command(arguments: list[str]) -> Command:
    """Split the command line into flags and overrides.

    Raises:
        ConfigError: with every flag that is not known.
    """
    words = iter(_split_values(arguments))
    overrides, flags = [], set()
    problems = []
    for word in words:
        if word in ("-h", "--help", "--resolve"):
            flags.add(word)
        elif word in ("-c", "--cfg"):
            value = next(words, "")
            flags.add("--cfg")
            if value != "job":
                problems.append(Problem(key=word, value=value, rule="prints the job only", fix="write --cfg job"))
        elif word.startswith("-"):
            problems.append(_unknown_flag(word))
        else:
            overrides.append(word)
    if "--resolve" in flags and "--cfg" not in flags:
        problems.append(
            Problem(key="--resolve", value=NO_VALUE, rule="stands beside --cfg", fix="write --cfg job --resolve")
        )
    require(problems)
    shows_help = bool(flags & {"-h", "--help"})
    return Command(overrides=overrides, shows_help=shows_help, shows_config="--cfg" in flags)


def _split_values(arguments: list[str]) -> list[str]:
    """Turn ``--cfg=job`` into two words."""
    words = []
    for argument in arguments:
        words += argument.split("=", 1) if argument.startswith("--cfg=") else [argument]
    return words


def _unknown_flag(word: str) -> Problem:
    name = word.lstrip("-")
    match = closest(word, ["--help", "--cfg", "--resolve"])
    fix = f"did you mean {match}?" if match else f"flags: {', '.join(FLAGS)}"
    if "=" in name:
        fix = f"keys have no dashes: {name}"
    return Problem(key=word, value=NO_VALUE, rule="unknown flag", fix=fix)
