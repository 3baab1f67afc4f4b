"""What is wrong with a configuration, in a form that can be collected and printed together."""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from math import inf
from operator import attrgetter
from typing import TypeVar

T = TypeVar("T")

LARGEST_INTEGER = 2**63 - 1  # what tensors can count

NO_VALUE = object()  # where a problem has no value to show


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One violated rule.

    Args:
        key: Dotted key, relative to the config that found it (``mamba.num_heads``).
        value: What was found.
        rule: What must hold.
        fix: What the user can do about it.
    """

    key: str
    value: object
    rule: str
    fix: str

    def below(self, prefix: str) -> "Problem":
        """Return the same problem with its key moved below ``prefix``."""
        return replace(self, key=".".join(part for part in (prefix, self.key) if part))

    def __str__(self) -> str:
        value = "" if self.value is NO_VALUE else f" = {_shown(self.value)}"
        return f"{self.key}{value}\n    rule: {self.rule}\n    fix:  {self.fix}"


class ConfigError(ValueError):
    """One or more violated rules; ``problems`` holds them all."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        super().__init__("\n".join(str(problem) for problem in problems))


def require(problems: list[Problem]) -> None:
    """Raise ``ConfigError`` with every problem, if there is one."""
    if problems:
        raise ConfigError(problems)


def report(problems: list[Problem]) -> str:
    """Write problems for the console: a heading and one numbered paragraph each."""
    count = len(problems)
    heading = f"The run cannot start: {count} problem{'s' if count > 1 else ''}."
    paragraphs = [f"{number}. {problem}" for number, problem in enumerate(problems, start=1)]
    return "\n\n".join([heading, *paragraphs, "`python scripts/pretrain.py --help` lists groups, choices and keys."])


@dataclass(frozen=True)
class Rule:
    """One check of one value, for ``check``.

    Args:
        key: Dotted name of the checked field, relative to the config that is checked.
        holds: Whether the value is fine.
        rule: What must hold; a function where the text quotes other values.
        fix: What the user can do about it.
    """

    key: str
    holds: Callable[[], bool]
    rule: str | Callable[[], str]
    fix: str

    def problem(self, cfg: object) -> Problem:
        """Return what to say when the rule does not hold for ``cfg``."""
        rule = self.rule if isinstance(self.rule, str) else self.rule()
        return Problem(key=self.key, value=attrgetter(self.key)(cfg), rule=rule, fix=self.fix)


def violations(cfg: object, *rules: Rule) -> list[Problem]:
    """Return a problem for each rule that does not hold.

    The loader also checks a config of which a field has no value, because the value in the YAML is wrong and reported
    already: rules that read such a field are skipped, the others still speak.
    """
    problems = []
    for rule in rules:
        try:
            if not rule.holds():
                problems.append(rule.problem(cfg))
        except AttributeError:
            if is_complete(cfg):
                raise
    return problems


def findings(cfg: T, *finders: Callable[[T], list[Problem]]) -> list[Problem]:
    """Return what the finders find; one that reads a field without a value is skipped, as in ``violations``."""
    problems: list[Problem] = []
    for find in finders:
        try:
            problems += find(cfg)
        except AttributeError:
            if is_complete(cfg):
                raise
    return problems


def check(cfg: object, *rules: Rule) -> None:
    """Raise ``ConfigError`` with every rule that does not hold."""
    require(violations(cfg, *rules))


def is_complete(cfg: object) -> bool:
    """Whether every field of a config, and of the configs inside it, has a value."""
    if isinstance(cfg, dict):
        return all(map(is_complete, cfg.values()))
    if not is_dataclass(cfg):
        return True
    return all(hasattr(cfg, field.name) and is_complete(getattr(cfg, field.name)) for field in fields(cfg))


def positive(cfg: object, *names: str) -> list[Rule]:
    """Rules: each of these fields is above 0, and finite."""
    rules = [Rule(name, _compare(cfg, name, above=True), "must be positive", "give a value above 0") for name in names]
    return [*rules, *_not_infinite(cfg, *names)]


def not_negative(cfg: object, *names: str) -> list[Rule]:
    """Rules: each of these fields is 0 or above, and finite."""
    rules = [Rule(name, _compare(cfg, name, above=False), "must not be negative", "give 0 or more") for name in names]
    return [*rules, *_not_infinite(cfg, *names)]


def _not_infinite(cfg: object, *names: str) -> list[Rule]:
    def rule(name: str) -> str:
        return f"must be at most {LARGEST_INTEGER}" if isinstance(getattr(cfg, name), int) else "must be finite"

    return [
        Rule(name, partial(_is_not_infinite, cfg, name), partial(rule, name), "give a smaller number") for name in names
    ]


def _is_not_infinite(cfg: object, name: str) -> bool:
    value = getattr(cfg, name)
    return bool(value <= LARGEST_INTEGER if isinstance(value, int) else value != inf)


def _compare(cfg: object, name: str, *, above: bool) -> Callable[[], bool]:
    # NaN compares false with everything, so it satisfies neither rule.
    return lambda: bool(getattr(cfg, name) > 0 if above else getattr(cfg, name) >= 0)


def _shown(value: object) -> str:
    """Write a value as YAML would."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return value if isinstance(value, str) and value else repr(value)
