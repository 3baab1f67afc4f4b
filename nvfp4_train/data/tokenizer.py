"""Train the byte-level BPE and turn text into token ids with it."""

import heapq
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from nvfp4_train.data.corpus import Document
from nvfp4_train.data.split import Split

END_OF_DOCUMENT = "<|endoftext|>"
# More text than this moves a 4096-entry vocabulary by about 1.5 % in tokens and costs seconds.
_SAMPLE_CHARACTERS = 16_000_000
_PIECE_CHARACTERS = 100_000
_BATCH_CHARACTERS = 4_000_000
# The pre-tokenizer always breaks around a newline between two visible characters, so cutting there changes no token.
_SAFE_CUT = re.compile(r"(?<=\S\n)(?=\S)")
# Training takes time quadratic in the length of a word: a megabyte without a space would take hours.
_LONG_WORD = re.compile(r"(\S{2000})")


def tokenizer_version() -> str:
    """Return the version of the library that trains and encodes."""
    return tokenizers.__version__


def train_tokenizer(
    documents: Iterable[Document], *, vocab_size: int, sample_characters: int = _SAMPLE_CHARACTERS
) -> Tokenizer:
    """Train a byte-level BPE on the text, or on a sample of it that the documents' hashes choose.

    The same documents give the same tokenizer, in any order. A short text may not hold enough pairs to fill the
    vocabulary.

    Args:
        documents: Text to train on.
        vocab_size: Entries at most, including the 256 bytes and ``END_OF_DOCUMENT``, which is id 0.
        sample_characters: Text to train on at most.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sample = _sample(documents, sample_characters)
    tokenizer.train_from_iterator((part for text in sample for part in split_long_words(text)), trainer)
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """Load a ``tokenizer.json`` so that text that spells a special token is read as text."""
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.encode_special_tokens = True
    return tokenizer


def encode_documents(
    documents: Iterable[tuple[Split, Document]],
    *,
    tokenizer: Tokenizer,
    dtype: np.dtype,
    advance: Callable[[int], None],
) -> Iterator[tuple[Split, np.ndarray]]:
    """Yield each document's token ids followed by the end-of-document token, with the split it belongs to.

    Long documents are encoded in pieces, and pieces of many documents together, so that every core works and memory
    stays bounded.

    Args:
        documents: Text to encode, with the split it belongs to.
        tokenizer: Byte-level BPE from ``load_tokenizer``.
        dtype: dtype of the ids.
        advance: Told how many more characters are done.
    """
    end = tokenizer.token_to_id(END_OF_DOCUMENT)
    for group in _grouped(documents):
        pieces = [_pieces(document.text) for _, document in group]
        encoded = iter(
            tokenizer.encode_batch_fast([piece for parts in pieces for piece in parts], add_special_tokens=False)
        )
        for (split, _), parts in zip(group, pieces, strict=True):
            ids = [np.asarray(next(encoded).ids, dtype=dtype) for _ in parts]
            yield split, np.concatenate([*ids, np.asarray([end], dtype=dtype)])
        advance(sum(len(document.text) for _, document in group))


def split_long_words(text: str) -> list[str]:
    """Cut words of thousands of characters: training time grows with the square of a word's length."""
    return _LONG_WORD.split(text)


def _sample(documents: Iterable[Document], max_characters: int) -> list[str]:
    """Return the documents of the smallest hashes, up to ``max_characters``, keeping no more than that in memory."""
    kept: list[tuple[int, str]] = []  # a heap with the largest hash on top
    size = 0
    bound = 1 << 64  # hashes from here on are out, which makes the sample independent of the order of documents
    for document in documents:
        rank = int.from_bytes(document.digest[8:], "little")
        if rank >= bound:
            continue
        heapq.heappush(kept, (-rank, document.text))
        size += len(document.text)
        while size > max_characters and len(kept) > 1:
            largest, text = heapq.heappop(kept)
            bound = -largest
            size -= len(text)
    return [text[:max_characters] for _, text in sorted(kept)]


def _grouped(documents: Iterable[tuple[Split, Document]]) -> Iterator[list[tuple[Split, Document]]]:
    group: list[tuple[Split, Document]] = []
    size = 0
    for split, document in documents:
        group.append((split, document))
        size += len(document.text)
        if size >= _BATCH_CHARACTERS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _pieces(text: str) -> list[str]:
    pieces = []
    start = 0
    while len(text) - start > _PIECE_CHARACTERS:
        cut = _SAFE_CUT.search(text, start + _PIECE_CHARACTERS)
        end = cut.start() if cut else len(text)
        pieces.append(text[start:end])
        start = end
    pieces.append(text[start:])
    return [piece for piece in pieces if piece]
