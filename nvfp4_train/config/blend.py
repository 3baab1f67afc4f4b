"""Which sources a run over token files reads, how much of each, and when that changes."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nvfp4_train.config.problem import Problem, Rule, check, positive


@dataclass(kw_only=True, slots=True)
class SourceConfig:
    """Token files that are read as one.

    Args:
        paths: ``.bin/.idx`` pairs without their ending, folders or globs of them; local or fsspec URIs.
        weight: Share in phases that name none; null for all sources: in proportion to their tokens.
        tokens: The same as a number of tokens.
        max_epochs: How often its tokens are read at most; the others then share what is left. null: no limit.
        loss: Whether its labels count; false: its tokens are context that is not trained on.
        fim_rate: Share of its documents that become a fill-in-the-middle task.
        fim_spm_rate: Share of those that give the suffix first (SPM) and not the prefix (PSM).
    """

    paths: list[str]
    weight: float | None = None
    tokens: int | None = None
    max_epochs: float | None = None
    loss: bool = True
    fim_rate: float = 0.0
    fim_spm_rate: float = 0.5

    def __post_init__(self) -> None:
        check(
            self,
            Rule(
                "paths",
                lambda: bool(self.paths) and all(self.paths),
                "must name at least one .bin/.idx pair, folder or glob, and no empty name",
                "the path of a pair without its ending: [data/web_text_document]",
            ),
            Rule(
                "weight",
                lambda: self.weight is None or is_weight(self.weight),
                "must be 0 or more, and finite",
                "weights are shares: 0.7 and 0.3 or 7 and 3",
            ),
            Rule("tokens", lambda: self.tokens is None or self.tokens >= 0, "must not be negative", "give 0 or more"),
            Rule(
                "tokens",
                lambda: self.tokens is None or self.weight is None,
                "says the same as weight, and both are given",
                "give one of the two",
            ),
            Rule(
                "max_epochs",
                lambda: self.max_epochs is None or (self.max_epochs > 0 and math.isfinite(self.max_epochs)),
                "must be null or above 0",
                "4 reads every token four times at most",
            ),
            *(
                Rule(name, _is_share(self, name), "must lie between 0 and 1", "0.5 is every second one")
                for name in ("fim_rate", "fim_spm_rate")
            ),
        )


@dataclass(kw_only=True, slots=True)
class ValidationConfig:
    """Held-out token files.

    Args:
        paths: As those of a source.
    """

    paths: list[str]

    def __post_init__(self) -> None:
        check(
            self,
            Rule(
                "paths",
                lambda: bool(self.paths) and all(self.paths),
                "must name at least one .bin/.idx pair, folder or glob, and no empty name",
                "the path of a pair without its ending: [data/web_validation]",
            ),
        )


@dataclass(kw_only=True, slots=True)
class PhaseConfig:
    """A part of the run and its blend. It begins where the phase before it ends.

    Args:
        end_fraction: Share of ``run.tokens`` at which it ends; 1 is the end of the run.
        end_tokens: The same in tokens from the start of the run.
        weights: Shares of the sources, those not named get none; null: their own weights.
        tokens: The same as numbers of tokens; together at least what the phase takes.
    """

    end_fraction: float | None = None
    end_tokens: int | None = None
    weights: dict[str, float] | None = None
    tokens: dict[str, int] | None = None

    def __post_init__(self) -> None:
        check(
            self,
            Rule(
                "end_fraction",
                lambda: (self.end_fraction is None) != (self.end_tokens is None),
                "a phase ends at end_fraction or at end_tokens: exactly one must be given",
                "end_fraction=0.7, or end_fraction=1 for the last phase",
            ),
            Rule(
                "end_fraction",
                lambda: self.end_fraction is None or 0 < self.end_fraction <= 1,
                "must be above 0 and at most 1",
                "0.7 ends the phase when 70 % of run.tokens are read",
            ),
            *(positive(self, "end_tokens") if getattr(self, "end_tokens", None) is not None else []),
            Rule(
                "tokens",
                lambda: self.tokens is None or self.weights is None,
                "says the same as weights, and both are given",
                "give one of the two",
            ),
            *(
                Rule(name, _is_blend(self, name), "must be 0 or more, finite, and not all 0", "{web: 0.7, code: 0.3}")
                for name in ("weights", "tokens")
            ),
        )

    def end(self, run_tokens: int) -> int:
        """Return the token of the run at which the phase ends."""
        return round(self.end_fraction * run_tokens) if self.end_tokens is None else self.end_tokens  # type: ignore[operator]

    def shares(self) -> Mapping[str, float] | None:
        """Return what the phase says about its blend."""
        return self.tokens if self.weights is None else self.weights


def is_weight(value: float) -> bool:
    """Return whether a number can be a share: not negative, not NaN, not infinite."""
    return value >= 0 and math.isfinite(value)


def blend_problems(sources: Mapping[str, SourceConfig], phases: Mapping[str, PhaseConfig]) -> list[Problem]:
    """Return what is wrong between sources and phases."""
    problems = [
        Problem(key=f"sources.{name}", value=name, rule="a name of letters, digits, - and _", fix="rename it")
        for name in sources
        if not name.replace("-", "_").isidentifier()
    ]
    if not sources:
        rule, fix = "must name at least one source", "data.sources='{web: {paths: [data/web_text_document]}}'"
        problems.append(Problem(key="sources", value="{}", rule=rule, fix=fix))
    own = [source.tokens if source.weight is None else source.weight for source in sources.values()]
    kinds = {(source.weight is None, source.tokens is None) for source in sources.values()}
    uses_own = any(phase.shares() is None for phase in phases.values()) or not phases
    if sources and uses_own and len(kinds) > 1:
        rule = "either all sources say weight, or all say tokens, or none says either"
        problems.append(Problem(key="sources", value=", ".join(sources), rule=rule, fix="complete the others"))
    elif sources and uses_own and not any(own) and kinds != {(True, True)}:
        rule = "at least one source must have a share above 0"
        problems.append(Problem(key="sources", value=", ".join(sources), rule=rule, fix="raise a weight"))
    for name, phase in phases.items():
        unknown = [source for source in phase.shares() or {} if source not in sources]
        if unknown:
            rule = f"must name sources of data.sources ({', '.join(sources)})"
            fix = "correct the name, or add the source"
            problems.append(Problem(key=f"phases.{name}", value=", ".join(unknown), rule=rule, fix=fix))
    return problems


def coverage_problems(
    sources: Mapping[str, SourceConfig], phases: Mapping[str, PhaseConfig], *, run_tokens: int
) -> list[Problem]:
    """Return where the phases, or the token counts, do not cover a run of ``run_tokens`` tokens."""
    problems: list[Problem] = []
    start = 0
    for name, phase in phases.items():
        end = phase.end(run_tokens)
        if end <= start:
            rule = f"must end after the phase before it ends (token {start} of the run)"
            problems.append(Problem(key=f"phases.{name}", value=f"an end at {end}", rule=rule, fix="raise its end"))
        problems += _count_problems(f"phases.{name}", phase.tokens, length=min(end, run_tokens) - start)
        start = max(start, end)
    if phases and start < run_tokens:
        name = list(phases)[-1]
        rule = f"the phases must cover the run: the last one must reach run.tokens ({run_tokens})"
        fix = f"data.phases.{name}.end_fraction=1 data.phases.{name}.end_tokens=null"
        problems.append(Problem(key=f"phases.{name}", value=f"an end at {start}", rule=rule, fix=fix))
    if not phases:
        counts = {name: source.tokens for name, source in sources.items() if source.tokens is not None}
        problems += _count_problems("sources", counts or None, length=run_tokens)
    return problems


def _count_problems(key: str, counts: Mapping[str, int] | None, *, length: int) -> list[Problem]:
    if counts is None or sum(counts.values()) >= length:
        return []
    rule = f"the tokens of its sources must cover the {length} tokens that it takes"
    return [Problem(key=key, value=f"{sum(counts.values())} tokens", rule=rule, fix="raise them, or give weights")]


def _is_share(cfg: SourceConfig, name: str) -> Callable[[], bool]:
    return lambda: 0 <= getattr(cfg, name) <= 1


def _is_blend(cfg: PhaseConfig, name: str) -> Callable[[], bool]:
    def holds() -> bool:
        shares = getattr(cfg, name)
        return shares is None or (all(map(is_weight, shares.values())) and any(shares.values()))

    return holds
