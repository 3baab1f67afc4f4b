"""From a data config to what the trainer reads."""

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvfp4_train.config.batch import BatchConfig
from nvfp4_train.config.data import DataConfig, TextDataConfig
from nvfp4_train.config.indexed_data import IndexedDataConfig, OnChange
from nvfp4_train.config.run import RunConfig
from nvfp4_train.data.blended import BlendedData
from nvfp4_train.data.fingerprint import combined_fingerprint
from nvfp4_train.data.indexed import IndexedTokens
from nvfp4_train.data.loader import Loader, ValidationSet
from nvfp4_train.data.order import PrefixStableOrder
from nvfp4_train.data.packing import PackedTokens
from nvfp4_train.data.plan import UNLIMITED, Phase, Plan
from nvfp4_train.data.prepare import prepare_data
from nvfp4_train.data.source import SourceTokens
from nvfp4_train.data.split import Split
from nvfp4_train.data.staging import Staging
from nvfp4_train.data.state import begin_phase, describe_state, find_changes, stream_fingerprint
from nvfp4_train.data.stream import Feed, MixedStream, SequenceStream

# Runs of any seed validate on the same sequences, so that their losses can be compared.
_VALIDATION_SEED = 0
TEXT = "text"  # the one source, and the one validation set, of text that is tokenized before the run


@dataclass(frozen=True, kw_only=True)
class _Opened:
    """What a leaf of the data config gives."""

    training: MixedStream
    validation: Mapping[str, SequenceStream]
    tokenizer_path: Path | None
    vocab_size: int
    new_phase: bool


class TrainingData:
    """Everything that a run reads, and where it stands in it.

    Attributes:
        loader: Training batches.
        validation: Validation batches by name.
        tokenizer_path: ``tokenizer.json``, where the run has one.
        vocab_size: Entries of the tokenizer; those of the model where the tokenizer is not known.
        fingerprint: Hash of what the sources give, in their order; equal exactly where that is.
        num_sequences: Training sequences that hold each token once.
        starts_new_phase: Whether a run may go on although its data changed.
    """

    def __init__(
        self, opened: _Opened, *, loader: Loader, validation: dict[str, ValidationSet], stack: ExitStack
    ) -> None:
        self.loader = loader
        self.validation = validation
        self.tokenizer_path = opened.tokenizer_path
        self.vocab_size = opened.vocab_size
        self.fingerprint = stream_fingerprint(opened.training)
        self.num_sequences = sum(int(feed.samples_per_epoch) for feed in opened.training.feeds)
        self.starts_new_phase = opened.new_phase
        self._stream = opened.training
        self._stack = stack

    def close(self) -> None:
        """End the background thread and let go of staged files."""
        self._stack.close()

    def state(self, sequences: int) -> dict[str, object]:
        """Return what a checkpoint keeps after so many sequences of the loader: rank-free cursors in tokens."""
        return describe_state(self._stream, position=sequences)

    def changes(self, saved: Mapping[str, Any], *, sequences: int) -> list[str]:
        """Go to where a checkpoint stopped, and return why that cannot be done exactly; nothing where it can.

        Args:
            saved: What ``state`` returned.
            sequences: For how many sequences.
        """
        return find_changes(self._stream, saved, position=sequences)

    def begin_phase(self, saved: Mapping[str, Any], *, tokens: int) -> dict[str, int]:
        """Start at sequence 0 of these data; sources that are the same go on where the checkpoint stopped.

        Args:
            saved: What ``state`` returned.
            tokens: Tokens of the run so far.

        Returns:
            Tokens that have been read from each source.
        """
        return begin_phase(self._stream, saved, tokens=tokens)

    def check_lasts(self, *, run: RunConfig, batch: BatchConfig) -> None:
        """Check that the sources last from where the run stands in them to its end.

        Raises:
            DataError: Every source will have been read as often as it may be before that.
        """
        self._stream.check_lasts(run.tokens, step_tokens=batch.tokens)

    def metrics(self, sequences: int) -> dict[str, float]:
        """Return what each source has given after so many sequences of the loader: tokens and epochs."""
        given = self._stream.given(sequences)
        values: dict[str, float] = {}
        for feed in self._stream.feeds:
            values[f"data/{feed.name}/tokens"] = given[feed.name] * self._stream.sequence_length
            values[f"data/{feed.name}/epochs"] = given[feed.name] / feed.samples_per_epoch
        return values


def build_data(
    cfg: DataConfig, *, batch: BatchConfig, run: RunConfig, vocab_size: int, dp_rank: int = 0, dp_degree: int = 1
) -> TrainingData:
    """Prepare the data where that is needed, and open it.

    Ranks may call this at the same time; the first prepares and the others wait.

    Args:
        cfg: Where tokens come from.
        batch: Sizes of a step.
        run: Budget, and seed of the order.
        vocab_size: Entries of the model's vocabulary.
        dp_rank: Index of this rank among those that read different data.
        dp_degree: Number of such ranks.

    Raises:
        DataError: The text, the cache folder or token files cannot be used.
        ValueError: The tokenizer has more entries than the model.
    """
    with ExitStack() as stack:
        match cfg:
            case TextDataConfig():
                opened = _open_text(cfg, batch=batch, run=run, vocab_size=vocab_size)
            case IndexedDataConfig():
                opened = _open_indexed(cfg, batch=batch, run=run, vocab_size=vocab_size, stack=stack)
            case _:
                raise TypeError(f"no reader for {type(cfg).__name__}")
        loader = Loader(
            opened.training,
            micro_batch_size=batch.micro_batch_size,
            dp_rank=dp_rank,
            dp_degree=dp_degree,
            prefetch=cfg.prefetch,
        )
        stack.callback(loader.close)
        validation = {
            name: ValidationSet(stream, dp_rank=dp_rank, dp_degree=dp_degree)
            for name, stream in opened.validation.items()
        }
        return TrainingData(opened, loader=loader, validation=validation, stack=stack.pop_all())


def _open_text(cfg: TextDataConfig, *, batch: BatchConfig, run: RunConfig, vocab_size: int) -> _Opened:
    prepared = prepare_data(cfg)
    manifest = prepared.manifest
    if manifest.vocab_size > vocab_size:
        raise ValueError(
            f"the tokenizer {prepared.tokenizer_path} has {manifest.vocab_size} entries but "
            f"model.vocab_size is {vocab_size}; raise model.vocab_size or lower data.tokenizer_vocab_size"
        )

    def pack(split: Split) -> PackedTokens:
        source = SourceTokens([IndexedTokens(prefix) for prefix in prepared.prefixes(split)])
        return PackedTokens(source, sequence_length=batch.sequence_length, vocab_size=vocab_size)

    packed, held_out = pack(Split.train), pack(Split.validation)
    feed = Feed(
        name=TEXT,
        samples=packed,
        order=PrefixStableOrder(num_samples=packed.num_samples, seed=run.seed),
        samples_per_epoch=packed.num_samples,
        fingerprint=combined_fingerprint(manifest.fingerprint, batch.sequence_length, run.seed),
    )
    phases = [Phase(name="run", end=None, weights=[1.0])]
    training = MixedStream(
        [feed], plan=lambda origin: Plan(phases, given=[origin.given.get(TEXT, 0)], limits=[UNLIMITED])
    )
    order = PrefixStableOrder(num_samples=held_out.num_samples, seed=_VALIDATION_SEED)
    return _Opened(
        training=training,
        validation={TEXT: SequenceStream(held_out, order=order)},
        tokenizer_path=prepared.tokenizer_path,
        vocab_size=manifest.vocab_size,
        new_phase=False,
    )


def _open_indexed(
    cfg: IndexedDataConfig, *, batch: BatchConfig, run: RunConfig, vocab_size: int, stack: ExitStack
) -> _Opened:
    cache_dir = Path(os.path.expandvars(cfg.cache_dir)).expanduser()
    staging = stack.enter_context(Staging(cache_dir / "staged", max_bytes=round(cfg.staging_gib * 2**30)))
    blended = BlendedData(cfg, run=run, batch=batch, vocab_size=vocab_size, cache_dir=cache_dir, staging=staging)
    return _Opened(
        training=blended.training(),
        validation=blended.validation(),
        tokenizer_path=None,
        vocab_size=vocab_size,
        new_phase=cfg.on_change is OnChange.new_phase,
    )
