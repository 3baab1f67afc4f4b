"""From a data config to what the trainer reads."""

from dataclasses import dataclass
from pathlib import Path

from nvfp4_train.config.batch import BatchConfig
from nvfp4_train.config.data import DataConfig
from nvfp4_train.data.indexed import IndexedTokens
from nvfp4_train.data.loader import Loader, ValidationSet
from nvfp4_train.data.packing import PackedTokens
from nvfp4_train.data.prepare import prepare_data
from nvfp4_train.data.split import Split
from nvfp4_train.data.stream import SequenceStream

# Runs of any seed validate on the same sequences, so that their losses can be compared.
_VALIDATION_SEED = 0


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """Everything that a run reads.

    Args:
        loader: Training batches.
        validation: Validation batches.
        tokenizer_path: ``tokenizer.json``.
        vocab_size: Entries of the tokenizer.
        fingerprint: Hash of tokens, boundaries and tokenizer; equal exactly where the data is.
        num_tokens: Training tokens of one epoch.
        num_sequences: Training sequences of one epoch.
        num_validation_tokens: Validation tokens.
    """

    loader: Loader
    validation: ValidationSet
    tokenizer_path: Path
    vocab_size: int
    fingerprint: str
    num_tokens: int
    num_sequences: int
    num_validation_tokens: int

    def close(self) -> None:
        """End the background thread."""
        self.loader.close()


def build_data(
    cfg: DataConfig, *, batch: BatchConfig, seed: int, vocab_size: int, dp_rank: int = 0, dp_degree: int = 1
) -> TrainingData:
    """Prepare the data where that is needed, and open it.

    Ranks may call this at the same time; the first prepares and the others wait.

    Args:
        cfg: Where text comes from.
        batch: Sizes of a step.
        seed: Seed of the order.
        vocab_size: Entries of the model's vocabulary.
        dp_rank: Index of this rank among those that read different data.
        dp_degree: Number of such ranks.

    Raises:
        DataError: The text, the cache folder or the prepared files cannot be used.
        ValueError: The tokenizer has more entries than the model.
    """
    prepared = prepare_data(cfg)
    manifest = prepared.manifest
    if manifest.vocab_size > vocab_size:
        raise ValueError(
            f"the tokenizer {prepared.tokenizer_path} has {manifest.vocab_size} entries but "
            f"model.vocab_size is {vocab_size}; raise model.vocab_size or lower data.tokenizer_vocab_size"
        )

    def stream(split: Split, order_seed: int) -> SequenceStream:
        source = IndexedTokens(prepared.prefix(split))
        packed = PackedTokens(source, sequence_length=batch.sequence_length, vocab_size=vocab_size)
        return SequenceStream(packed, seed=order_seed)

    training = stream(Split.train, seed)
    validation = stream(Split.validation, _VALIDATION_SEED)
    loader = Loader(
        training,
        micro_batch_size=batch.micro_batch_size,
        dp_rank=dp_rank,
        dp_degree=dp_degree,
        prefetch=cfg.prefetch,
    )
    return TrainingData(
        loader=loader,
        validation=ValidationSet(validation, dp_rank=dp_rank, dp_degree=dp_degree),
        tokenizer_path=prepared.tokenizer_path,
        vocab_size=manifest.vocab_size,
        fingerprint=manifest.fingerprint,
        num_tokens=manifest.num_tokens[Split.train],
        num_sequences=training.num_sequences,
        num_validation_tokens=manifest.num_tokens[Split.validation],
    )
