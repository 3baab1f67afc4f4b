"""Fill-in-the-middle: some documents become the task of finding a part from what is around it.

Such a document is cut at two random places and written as ``PREFIX p SUFFIX s MIDDLE m`` (PSM) or ``PREFIX SUFFIX s
MIDDLE p m`` (SPM), three tokens longer. Which documents, where they are cut and in which form is a hash of (seed,
document), so nothing depends on epochs, ranks, workers or restarts.

Source: Bavarian et al., "Efficient Training of Language Models to Fill in the Middle", 2022 (SPM is its variant 2).
"""

import hashlib
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nvfp4_train.data.order import mix
from nvfp4_train.data.source import TokenStream

ADDED = 3  # tokens
_SHORTEST = 4  # A shorter document stays as it is: there is nothing to fill in.
_BLOCK = 256  # Documents between two entries of the index: enough for one array operation, few enough to redo.
_CHUNK = 1 << 16


@dataclass(frozen=True, kw_only=True)
class FimRule:
    """Which documents change, and how.

    Args:
        rate: Share of the documents that change.
        spm_rate: Share of these in the SPM form.
        prefix: Token ahead of the prefix.
        middle: Token ahead of the middle.
        suffix: Token ahead of the suffix.
        document_end: Token that stays at the end of a document, if it has it there.
        seed: Seed of all choices.
    """

    rate: float
    spm_rate: float
    prefix: int
    middle: int
    suffix: int
    document_end: int | None
    seed: str


@dataclass(frozen=True, kw_only=True)
class _Window:
    """Documents of a range of tokens.

    Args:
        first: First token of the range.
        last: Token behind its last.
        starts: [D + 1], their first tokens here.
        originals: [D + 1], their first tokens in the source.
        chosen: [D], which change.
        form: [D], fractions that decide the form.
        cuts: [D], two fractions that decide where a document is cut.
    """

    first: int
    last: int
    starts: list[int]
    originals: list[int]
    chosen: list[bool]
    form: list[float]
    cuts: list[tuple[float, float]]


class FimTokens:
    """A stream in which some documents are fill-in-the-middle tasks.

    In memory is one integer for 256 documents.

    Args:
        source: The documents.
        rule: What happens to them.
    """

    def __init__(self, source: TokenStream, *, rule: FimRule) -> None:
        self._source = source
        self._rule = rule
        digest = hashlib.blake2b(f"fim/{rule.seed}".encode(), digest_size=32).digest()
        self._keys = np.frombuffer(digest, dtype="<u8")  # chosen, form, first cut, second cut
        self.num_documents = source.num_documents
        self._chosen_before = self._count_chosen()  # at every _BLOCK documents, and the end
        self.num_tokens = source.num_tokens + ADDED * int(self._chosen_before[-1])
        self._block_starts = self._starts_of_blocks()
        self._searched = self._block_starts.data
        self._last_window = _Window(first=0, last=0, starts=[], originals=[], chosen=[], form=[], cuts=[])

    def read(self, first: int, last: int) -> np.ndarray:
        """Return tokens ``first`` to ``last - 1``, [last - first] int64."""
        window = self._window(first, last)
        parts = []
        for index in range(len(window.starts) - 1):
            start, end = window.starts[index], window.starts[index + 1]
            low, high = max(first - start, 0), min(last, end) - start
            if low >= high:
                continue
            if window.chosen[index]:
                parts += self._part(window, index, low=low, high=high)
            else:
                original = window.originals[index]
                parts.append(self._source.read(original + low, original + high))
        return np.concatenate(parts, dtype=np.int64, casting="unsafe")

    def starts_within(self, first: int, last: int) -> list[int]:
        """Return where documents begin after token ``first`` and before ``last``."""
        return [start for start in self._window(first, last).starts[:-1] if first < start < last]

    def document_starts(self, first: int, last: int) -> np.ndarray:
        """Return [last - first] int64: the first token of documents ``first`` to ``last - 1``."""
        block = first // _BLOCK
        originals = self._source.document_starts(block * _BLOCK, last)
        if len(originals) == 0:
            return originals
        starts, _ = self._shifted(originals, block=block)
        return starts[first - block * _BLOCK :]

    def place(self, token: int) -> tuple[Path, int]:
        """Return the file that holds a token and its document's first token there."""
        return self._source.place(self._window(token, token + 1).originals[0])

    def _window(self, first: int, last: int) -> "_Window":
        """Return the documents that may lie in a range, and all that was drawn for them."""
        found = self._last_window
        if (found.first, found.last) == (first, last):
            return found
        low = bisect_right(self._searched, first) - 1
        high = bisect_right(self._searched, last)
        begin, end = low * _BLOCK, min(high * _BLOCK, self.num_documents)
        originals = self._source.document_starts(begin, end + 1)
        starts, chosen = self._shifted(originals, block=low)
        # The last document that begins at or before ``first``, to the last one that begins before ``last``.
        lower = int(np.searchsorted(starts, first, side="right")) - 1
        upper = min(int(np.searchsorted(starts, last, side="left")), end - begin)
        documents = np.arange(begin + lower, begin + upper)
        form, *cuts = (self._fraction(documents, key).tolist() for key in (1, 2, 3))
        found = _Window(
            first=first,
            last=last,
            starts=starts[lower : upper + 1].tolist(),
            originals=originals[lower : upper + 1].tolist(),
            chosen=chosen[lower:upper].tolist(),
            form=form,
            cuts=list(zip(*cuts, strict=True)),
        )
        self._last_window = found  # replaced whole: threads share it
        return found

    def _part(self, window: "_Window", index: int, *, low: int, high: int) -> list[np.ndarray]:
        """Return tokens ``low`` to ``high - 1`` of a document that changes."""
        parts, offset = [], 0
        for piece in self._pieces(window, index):
            first, last = (0, 1) if isinstance(piece, int) else piece
            begin, end = max(low - offset, 0), min(high - offset, last - first)
            if begin < end:
                is_token = isinstance(piece, int)
                parts.append(np.array([piece]) if is_token else self._source.read(first + begin, first + end))
            offset += last - first
        return parts

    def _pieces(self, window: "_Window", index: int) -> list[int | tuple[int, int]]:
        """Return what a document that changes consists of: tokens, and ranges of the source."""
        rule, (start, end) = self._rule, window.originals[index : index + 2]
        keeps_end = rule.document_end is not None and int(self._source.read(end - 1, end)[0]) == rule.document_end
        stop = end - keeps_end
        size = stop - start
        cut, other = sorted(start + min(int(cut * (size + 1)), size) for cut in window.cuts[index])
        prefix, middle, suffix = (start, cut), (cut, other), (other, stop)
        pieces: list[int | tuple[int, int]]
        if window.form[index] < rule.spm_rate:
            pieces = [rule.prefix, rule.suffix, suffix, rule.middle, prefix, middle]
        else:
            pieces = [rule.prefix, prefix, rule.suffix, suffix, rule.middle, middle]
        return [*pieces, (stop, end)]

    def _shifted(self, originals: np.ndarray, *, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return where documents begin here, [D + 1], and which change, [D]; the first is the first of a block."""
        first = block * _BLOCK
        chosen = self._chosen(np.arange(first, first + len(originals) - 1), np.diff(originals))
        starts = originals + ADDED * int(self._chosen_before[block])
        starts[1:] += ADDED * np.cumsum(chosen)
        return starts, chosen

    def _chosen(self, documents: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return (self._fraction(documents, 0) < self._rule.rate) & (lengths >= _SHORTEST)

    def _fraction(self, documents: np.ndarray, key: int) -> np.ndarray:
        return (self._words(documents, key) >> np.uint64(11)) / 2.0**53

    def _words(self, documents: np.ndarray, key: int) -> np.ndarray:
        return mix(mix(documents.astype(np.uint64) ^ self._keys[key]) + self._keys[key])

    def _count_chosen(self) -> np.ndarray:
        counts = [np.zeros(1, dtype=np.int64)]
        for first in range(0, self.num_documents, _CHUNK):
            last = min(first + _CHUNK, self.num_documents)
            lengths = np.diff(self._source.document_starts(first, last + 1))
            chosen = self._chosen(np.arange(first, last), lengths)
            counts.append(np.add.reduceat(chosen.astype(np.int64), np.arange(0, last - first, _BLOCK)))
        return np.cumsum(np.concatenate(counts))

    def _starts_of_blocks(self) -> np.ndarray:
        starts = [
            self._source.document_starts(first, min(first + _CHUNK, self.num_documents))[::_BLOCK]
            for first in range(0, self.num_documents, _CHUNK)
        ]
        return np.concatenate(starts) + ADDED * self._chosen_before[:-1]
