"""A run over token files: which ones, in which order, cut in which way."""

from dataclasses import dataclass
from enum import StrEnum

from nvfp4_train.config.blend import PhaseConfig, SourceConfig, ValidationConfig, blend_problems, is_weight
from nvfp4_train.config.data import DataConfig, data_rules
from nvfp4_train.config.problem import (
    Problem,
    Rule,
    check,
    findings,
    not_negative,
    positive,
    require,
    violations,
)


class Order(StrEnum):
    """In which order the samples of a source are read."""

    prefix_stable = "prefix_stable"  # a keyed permutation per epoch: a longer run starts as the shorter one
    megatron = "megatron"  # Megatron-LM's document, sample and shuffle indices, and its blending


class Packing(StrEnum):
    """How documents become rows of one length."""

    concatenate = "concatenate"  # end to end, cut where a row is full
    best_fit = "best_fit"  # a document that fits in a row is not cut; what is left of a row is padding


class OnChange(StrEnum):
    """What happens when a run continues and its data are not those that it has read."""

    refuse = "refuse"
    new_phase = "new_phase"  # from here on the new data; sources that are the same go on where they are


@dataclass(kw_only=True, slots=True)
class FimConfig:
    """Token ids of the fill-in-the-middle task; needed where a source has a ``fim_rate``.

    Args:
        prefix_token: Comes before the prefix.
        middle_token: Comes before the middle.
        suffix_token: Comes before the suffix.
        document_end_token: Stays at the end of a document; null: every token may move.
    """

    prefix_token: int | None
    middle_token: int | None
    suffix_token: int | None
    document_end_token: int | None


@dataclass(kw_only=True, slots=True)
class MegatronOrderConfig:
    """What ``order: megatron`` depends on besides the files.

    Args:
        split: Megatron's ``--split``: training, validation and test shares of every source, in file order.
        num_samples: Training samples that were asked for, on which the order depends; null: those of this run.
        extra_token: Megatron's ``add_extra_token_to_sequence``: a sample holds the label of its last token.
    """

    split: str
    num_samples: int | None
    extra_token: bool

    def __post_init__(self) -> None:
        check(
            self,
            Rule(
                "split",
                lambda: is_split(self.split),
                "must be three shares, not negative, the first above 0",
                '"100,0,0", or Megatron\'s "969,30,1"',
            ),
            *(positive(self, "num_samples") if getattr(self, "num_samples", None) is not None else []),
        )

    def shares(self) -> list[float]:
        """Return the three shares as they are written."""
        return [float(part) for part in self.split.split(",")]


def is_split(text: str) -> bool:
    """Return whether a text is a split of Megatron."""
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        return False
    return len(shares) == 3 and all(is_weight(share) for share in shares) and shares[0] > 0


@dataclass(kw_only=True, slots=True)
class IndexedDataConfig(DataConfig):
    """Megatron ``.bin/.idx`` files: sources, their blend over the run, order and packing.

    Args:
        sources: Training sources by name.
        phases: Parts of the run in their order, each with its blend; none: one blend for the whole run.
        validation: Validation sets by name.
        order: In which order samples are read.
        packing: How documents become rows.
        pad_token: Fills the end of rows that ``best_fit`` cannot fill; its label never counts.
        count_document_ends: Whether the last token of a document is trained to predict the first of the next, as
            Megatron does by default.
        on_change: What happens when a run continues on other data.
        staging_gib: What local copies of remote files may take in ``cache_dir``; all files of a run must fit.
        fim: Token ids of the fill-in-the-middle task.
        megatron: What ``order: megatron`` needs.
    """

    sources: dict[str, SourceConfig]
    phases: dict[str, PhaseConfig]
    validation: dict[str, ValidationConfig]
    order: Order
    packing: Packing
    pad_token: int
    count_document_ends: bool
    on_change: OnChange
    staging_gib: float
    fim: FimConfig
    megatron: MegatronOrderConfig

    def __post_init__(self) -> None:
        problems = violations(
            self,
            *data_rules(self),
            *not_negative(self, "pad_token"),
            *positive(self, "staging_gib"),
            Rule(
                "packing",
                lambda: self.order is Order.prefix_stable or self.packing is Packing.concatenate,
                "order: megatron cuts documents where a row is full, as Megatron does",
                "data.packing=concatenate",
            ),
            Rule(
                "on_change",
                lambda: self.order is Order.prefix_stable or self.on_change is OnChange.refuse,
                "order: megatron depends on the length of the whole run and cannot begin in its middle",
                "data.on_change=refuse",
            ),
        )
        require([*problems, *findings(self, _blend, _validation, _fim, _megatron)])


def _blend(cfg: IndexedDataConfig) -> list[Problem]:
    return blend_problems(cfg.sources, cfg.phases)


def _validation(cfg: IndexedDataConfig) -> list[Problem]:
    from_split = list(cfg.sources) if cfg.order is Order.megatron and cfg.megatron.shares()[1] > 0 else []
    if from_split or cfg.validation:
        rule = "data.megatron.split makes a validation set of each source, and this one has the name of a source"
        both = [name for name in cfg.validation if name in from_split]
        return [Problem(key=f"validation.{name}", value=name, rule=rule, fix="rename it") for name in both]
    fix = "data.validation='{web: {paths: [data/web_validation]}}'; prepare_data.py split makes such files"
    return [Problem(key="validation", value="{}", rule="must name at least one validation set", fix=fix)]


def _fim(cfg: IndexedDataConfig) -> list[Problem]:
    if not any(source.fim_rate for source in cfg.sources.values()):
        return []
    names = ("prefix_token", "middle_token", "suffix_token")
    return [
        Problem(
            key=f"fim.{name}",
            value=getattr(cfg.fim, name),
            rule="a source has a fim_rate, which needs this token's id",
            fix="give the id that the tokenizer has for it, or set fim_rate=0",
        )
        for name in names
        if getattr(cfg.fim, name) is None or getattr(cfg.fim, name) < 0
    ]


def _megatron(cfg: IndexedDataConfig) -> list[Problem]:
    if cfg.order is not Order.megatron:
        return []
    if len(cfg.sources) > 1 and any(source.weight is None for source in cfg.sources.values()):
        rule = "Megatron's blend needs the weight of every source"
        return [Problem(key="sources", value=", ".join(cfg.sources), rule=rule, fix="give every source its weight")]
    values: dict[str, object] = {"phases": bool(cfg.phases)}
    for name, source in cfg.sources.items():
        values |= {f"sources.{name}.max_epochs": source.max_epochs, f"sources.{name}.fim_rate": source.fim_rate}
    rule = "Megatron's order has no such thing"
    fix = "leave it out, or choose data.order=prefix_stable"
    return [Problem(key=key, value=value, rule=rule, fix=fix) for key, value in values.items() if value]
