"""Where tokens go: one pair or a row of shards for each part of the documents, resumable after each batch."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nvfp4_train.data.indexed_writer import IndexedWriter, WriterState
from nvfp4_train.data.manifest import Shard, describe_pair


@dataclass(kw_only=True)
class _Part:
    """The shards of one part: those that are finished, and the one that grows."""

    shards: list[Shard] = field(default_factory=list)
    num_tokens: int = 0
    num_documents: int = 0
    writer: IndexedWriter | None = None


class ShardedOutput:
    """Writes documents of several parts, in shards.

    A shard is full as soon as it holds ``shard_tokens``: it ends with the document that fills it, whichever batch
    brings that document.

    Args:
        folder: Where the pairs are written.
        names: Name of each part.
        dtype: dtype of a token.
        shard_tokens: Tokens that fill a shard; 0 for one pair of any size.
        state: What ``checkpoint`` returned; None to begin.
    """

    def __init__(
        self, folder: Path, *, names: list[str], dtype: np.dtype, shard_tokens: int, state: dict[str, Any] | None = None
    ) -> None:
        self._folder = folder
        self._dtype = dtype
        self._shard_tokens = shard_tokens
        self._parts = {name: _Part() for name in names}
        for name, saved in (state or {}).items():
            part = self._parts[name]
            part.shards = [Shard(**shard) for shard in saved["shards"]]
            part.num_tokens, part.num_documents = saved["num_tokens"], saved["num_documents"]
            if saved["writer"] is not None:
                part.writer = self._open(name, part, resume=WriterState(**saved["writer"]))

    @property
    def num_tokens(self) -> int:
        """Tokens of all parts."""
        return sum(part.num_tokens for part in self._parts.values())

    @property
    def num_documents(self) -> int:
        """Documents of all parts."""
        return sum(part.num_documents for part in self._parts.values())

    def add(self, name: str, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Add documents, given as for ``IndexedWriter.add_documents``, to a part."""
        part = self._parts[name]
        part.num_documents += len(lengths)
        part.num_tokens += len(tokens)
        while len(lengths):
            part.writer = part.writer or self._open(name, part)
            count = len(lengths)
            if self._shard_tokens:
                ends = part.writer.num_tokens + np.cumsum(lengths)
                count = min(count, 1 + int(np.searchsorted(ends, self._shard_tokens)))
            size = int(lengths[:count].sum())
            part.writer.add_documents(tokens[:size], lengths[:count])
            tokens, lengths = tokens[size:], lengths[count:]
            if self._shard_tokens and part.writer.num_tokens >= self._shard_tokens:
                self._end_shard(name, part)

    def checkpoint(self) -> dict[str, Any]:
        """Bring everything onto the disk and return the state to go on from, as JSON values."""
        return {
            name: {
                "shards": [asdict(shard) for shard in part.shards],
                "num_tokens": part.num_tokens,
                "num_documents": part.num_documents,
                "writer": asdict(part.writer.checkpoint()) if part.writer else None,
            }
            for name, part in self._parts.items()
        }

    def finish(self) -> dict[str, list[Shard]]:
        """End the last shards and return the shards of each part; a part without documents has none."""
        for name, part in self._parts.items():
            if part.writer is not None:
                self._end_shard(name, part)
        return {name: part.shards for name, part in self._parts.items()}

    def abandon(self, error: BaseException) -> None:
        """Close the files; what ``checkpoint`` recorded stays."""
        for part in self._parts.values():
            if part.writer is not None:
                part.writer.__exit__(type(error), error, error.__traceback__)

    def _open(self, name: str, part: _Part, *, resume: WriterState | None = None) -> IndexedWriter:
        return IndexedWriter(self._folder / self._shard_name(name, part), dtype=self._dtype, resume=resume)

    def _end_shard(self, name: str, part: _Part) -> None:
        assert part.writer is not None
        writer, part.writer = part.writer, None
        writer.__exit__(None, None, None)
        part.shards.append(
            describe_pair(
                self._folder / self._shard_name(name, part),
                num_documents=writer.num_documents,
                num_tokens=writer.num_tokens,
            )
        )

    def _shard_name(self, name: str, part: _Part) -> str:
        return f"{name}_{len(part.shards):05}" if self._shard_tokens else name
