"""Where tokens come from. Each leaf class is one ``type`` of the ``data`` group."""

from dataclasses import dataclass

from nvfp4_train.config.problem import Rule, check, not_negative


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """What all data have.

    Args:
        cache_dir: Folder for prepared files, shared by runs; ``~`` and environment variables are expanded.
        prefetch: Microbatches that a background thread prepares ahead.
    """

    cache_dir: str
    prefetch: int


@dataclass(kw_only=True, slots=True)
class TextDataConfig(DataConfig):
    """Text that is tokenized before the run.

    Args:
        validation_fraction: Share of documents that a hash of their text puts into the validation set; where there are
            too few documents for that, the share of each document's end.
        tokenizer_vocab_size: Entries of the byte-level BPE that is trained on the text.
    """

    validation_fraction: float
    tokenizer_vocab_size: int


def data_rules(cfg: DataConfig) -> list[Rule]:
    """Rules for the fields that all data have."""
    return [
        Rule(
            "cache_dir", lambda: bool(cfg.cache_dir), "must name a folder", "data.cache_dir=~/.cache/nvfp4_train/data"
        ),
        *not_negative(cfg, "prefetch"),
    ]


def text_rules(cfg: TextDataConfig) -> list[Rule]:
    """Rules for the fields that all text has."""
    return [
        *data_rules(cfg),
        Rule(
            "validation_fraction",
            lambda: 0 < cfg.validation_fraction < 1,
            "must lie between 0 and 1",
            "0.02 keeps two files in a hundred for validation",
        ),
        Rule(
            "tokenizer_vocab_size",
            lambda: cfg.tokenizer_vocab_size >= 260,
            "must be at least 260: 256 bytes and the special tokens",
            "the demo uses 4096",
        ),
    ]


@dataclass(kw_only=True, slots=True)
class PythonStdlibDataConfig(TextDataConfig):
    """The running interpreter's standard library sources and its documentation topics: real text on every machine."""

    def __post_init__(self) -> None:
        check(self, *text_rules(self))


@dataclass(kw_only=True, slots=True)
class TextFilesDataConfig(TextDataConfig):
    """The user's own text.

    Args:
        paths: Files, folders or globs; ``.txt`` and ``.md`` are one document a file, ``.jsonl`` and ``.jsonl.gz`` one
            a line.
        jsonl_key: Key that holds the text of a jsonl line.
    """

    paths: list[str]
    jsonl_key: str

    def __post_init__(self) -> None:
        check(
            self,
            *text_rules(self),
            Rule(
                "paths",
                lambda: bool(self.paths) and all(self.paths),
                "must name at least one file, folder or glob, and no empty name",
                "data.paths='[my/text/*.txt]'",
            ),
            Rule("jsonl_key", lambda: bool(self.jsonl_key), "must name a key", "data.jsonl_key=text"),
        )
