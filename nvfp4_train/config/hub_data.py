"""A dataset of the Hugging Face hub, tokenized into local shards before the run."""

from dataclasses import dataclass

from nvfp4_train.config.data import TextDataConfig, text_rules
from nvfp4_train.config.problem import Rule, check, positive


@dataclass(kw_only=True, slots=True)
class HubDataConfig(TextDataConfig):
    """A dataset that the `datasets` library loads: by name, which needs a network the first time, or a local folder.

    Args:
        dataset: Name on the hub, or a local folder with its files.
        subset: Name of the configuration; empty for the default.
        split: Split to read.
        revision: Branch, tag or commit; empty for the newest when it is prepared.
        column: Column that holds the text.
        streaming: Read while downloading, which keeps no copy of the text; else everything is downloaded first.
        tokenizer: A ``tokenizer.json`` or a folder with one; empty to train one on the beginning of the text.
        tokenizer_characters: Text that a new tokenizer is trained on.
        max_tokens: Tokens to prepare, training and validation together; 0 for all there are.
        shard_tokens: Tokens of a local ``.bin/.idx`` pair.
        num_workers: Processes that tokenize.
    """

    dataset: str
    subset: str
    split: str
    revision: str
    column: str
    streaming: bool
    tokenizer: str
    tokenizer_characters: int
    max_tokens: int
    shard_tokens: int
    num_workers: int

    def __post_init__(self) -> None:
        check(
            self,
            *text_rules(self),
            Rule(
                "dataset", lambda: bool(self.dataset), "must name a dataset", "data.dataset=HuggingFaceFW/fineweb-edu"
            ),
            Rule("split", lambda: bool(self.split), "must name a split", "data.split=train"),
            Rule("column", lambda: bool(self.column), "must name a column", "data.column=text"),
            Rule("max_tokens", lambda: self.max_tokens >= 0, "must not be negative", "0 prepares everything"),
            *positive(self, "tokenizer_characters", "shard_tokens", "num_workers"),
        )
