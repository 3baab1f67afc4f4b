"""Rows in Megatron's order, read through its indices."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nvfp4_train.data.batch import IGNORE_INDEX
from nvfp4_train.data.cache import cached_folder
from nvfp4_train.data.error import DataError
from nvfp4_train.data.fingerprint import combined_fingerprint
from nvfp4_train.data.indexed import IndexedTokens
from nvfp4_train.data.megatron_order import MegatronIndices, blend_index, build_indices, split_bounds
from nvfp4_train.data.packing import check_vocabulary
from nvfp4_train.data.source import SourceTokens

_VERSION = 1  # Part of the cache key: raise it when the same options give other indices.
_BLEND = ("sources", "indices")


@dataclass(frozen=True, kw_only=True)
class MegatronRequest:
    """All that Megatron's indices of a source depend on.

    Args:
        fingerprint: Hash of the source's files.
        split: Shares of training, validation and test.
        part: Which of them, 0 to 2.
        num_samples: Samples that are asked for; None for one epoch.
        sequence_length: S.
        seed: Megatron's seed.
        extra_token: Whether a sample holds the label of its last token.
    """

    fingerprint: str
    split: tuple[float, float, float]
    part: int
    num_samples: int | None
    sequence_length: int
    seed: int
    extra_token: bool

    def key(self) -> str:
        """Return a hash of the request; the name of its cache folder."""
        return combined_fingerprint(
            _VERSION, self.fingerprint, self.split, self.part, self.num_samples, self.sequence_length, self.seed,
            self.extra_token,
        )  # fmt: skip


class MegatronSamples:
    """Sample k of a source as Megatron cuts it: across its shuffled sequences.

    Args:
        source: The tokens.
        pairs: The files of ``source``.
        request: Which samples.
        vocab_size: Entries of the model's vocabulary.
        count_document_ends: Whether the label of a sequence's last token counts, as Megatron does by default.
        cache_dir: Folder of all prepared files, of this machine: indices are built where they are missing.

    Raises:
        DataError: The part of the source has no sample.

    Attributes:
        key: Hash of all that the samples depend on.
        indices: Megatron's indices.
        samples_per_epoch: Samples that hold each token of the part once.
    """

    def __init__(
        self,
        source: SourceTokens,
        pairs: list[IndexedTokens],
        *,
        request: MegatronRequest,
        vocab_size: int,
        count_document_ends: bool,
        cache_dir: Path,
    ) -> None:
        lengths = np.concatenate([pair.lengths for pair in pairs])
        first, last = split_bounds(request.split, len(lengths))[request.part]
        tokens = int(lengths[first:last].sum(dtype=np.int64))
        if tokens < request.sequence_length + request.extra_token:
            raise DataError(
                pairs[0].data_path,
                found=f"{tokens} tokens in sequences {first} to {last - 1}, part {request.part} of the split",
                expected=f"at least {request.sequence_length + request.extra_token}, for one sample",
                fix="use more text, a shorter batch.sequence_length, or another data.megatron.split",
            )
        self.key = request.key()
        self.indices = _cached_indices(lengths[first:last], first, request, cache_dir)
        self.num_samples = len(self.indices.shuffle)
        self.sequence_length = request.sequence_length
        self.samples_per_epoch = tokens / request.sequence_length
        self._lengths = lengths
        self._starts = np.cumsum(lengths, dtype=np.int64) - lengths
        self._source = source
        self._extra = int(request.extra_token)
        self._vocab_size = vocab_size
        self._counts_ends = count_document_ends

    def order(self, positions: np.ndarray) -> np.ndarray:
        """Return the sample that is read at each position, [N] int64.

        Raises:
            DataError: A position lies beyond Megatron's indices.
        """
        if len(positions) and positions.max() >= self.num_samples:
            raise DataError(
                self._source.place(0)[0],
                found=f"{self.num_samples} samples in Megatron's order",
                expected=f"sample {int(positions.max())}",
                fix="raise data.megatron.num_samples, which gives another order",
            )
        return self.indices.shuffle[positions].astype(np.int64)

    def endless_order(self, positions: np.ndarray) -> np.ndarray:
        """Return the sample that is read at each position where the same order begins again after the last one."""
        return self.order(positions % self.num_samples)

    def fill(self, sample: int, *, tokens: np.ndarray, labels: np.ndarray) -> list[int]:
        """Write a row and return where documents begin in it; see ``Samples``."""
        length = self.sequence_length
        (row, offset), (last_row, last_offset) = self.indices.samples[sample : sample + 2].tolist()
        parts, starts, filled = [], [], 0
        for entry in range(row, last_row + 1):
            sequence = int(self.indices.documents[entry])
            begin = offset if entry == row else 0
            end = last_offset + self._extra if entry == last_row else int(self._lengths[sequence])
            if begin < end:
                starts.append(filled)
                first = int(self._starts[sequence]) + begin
                part = self._source.read(first, first + end - begin)
                check_vocabulary(part, source=self._source, first=first, vocab_size=self._vocab_size)
                parts.append(part)
                filled += end - begin
        window = parts[0] if len(parts) == 1 else np.concatenate(parts)
        tokens[:] = window[:length]
        labels[: filled - 1] = window[1:]
        labels[filled - 1 :] = IGNORE_INDEX  # without the extra token the last label is unknown
        if not self._counts_ends:
            for start in starts[1:]:
                labels[start - 1] = IGNORE_INDEX
        return starts[1:]


def _cached_indices(lengths: np.ndarray, first: int, request: MegatronRequest, cache_dir: Path) -> MegatronIndices:
    def make(folder: Path) -> None:
        indices = build_indices(
            lengths,
            first=first,
            num_samples=request.num_samples,
            sequence_length=request.sequence_length,
            seed=request.seed,
            extra_token=request.extra_token,
        )
        for name in ("documents", "samples", "shuffle"):
            np.save(folder / f"{name}.npy", getattr(indices, name))

    folder = cached_folder(cache_dir, key=f"megatron_{request.key()}", make=make)
    arrays = {name: _load(folder, name) for name in ("documents", "samples", "shuffle")}
    return MegatronIndices(**arrays)


def cached_blend(weights: list[float], *, num_samples: int, cache_dir: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return Megatron's blend of N samples, built once for each machine: sources [N] int16 and indices [N] int64."""
    key = combined_fingerprint(_VERSION, weights, num_samples)

    def make(folder: Path) -> None:
        for name, array in zip(_BLEND, blend_index(weights, num_samples), strict=True):
            np.save(folder / f"{name}.npy", array)
        (folder / "blend.json").write_text(json.dumps({"weights": weights, "num_samples": num_samples}) + "\n")

    folder = cached_folder(cache_dir, key=f"megatron_blend_{key}", make=make)
    return _load(folder, _BLEND[0]), _load(folder, _BLEND[1])


def _load(folder: Path, name: str) -> np.ndarray:
    return np.load(folder / f"{name}.npy", mmap_mode="r").view(np.ndarray)
