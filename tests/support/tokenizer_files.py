"""Small tokenizers of each kind."""

import base64
import io
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.support.token_files import GOLDEN_TEXT


def sample_texts() -> list[str]:
    """Return some English text."""
    lines = (GOLDEN_TEXT / "python_topics.jsonl").read_text().splitlines()[:5]
    return [json.loads(line)["text"] for line in lines]


def write_huggingface(path: Path, *, end: str = "<|endoftext|>", vocab_size: int = 300) -> Path:
    """Train a byte-level BPE with one special token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[end],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample_texts(), trainer)
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return path


def write_sentencepiece(path: Path, *, eos_id: int = 2) -> Path:
    """Train a model that keeps every byte and all white space."""
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(" ".join(sample_texts()).split("\n")),
        model_writer=model,
        vocab_size=400,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        eos_id=eos_id,
        minloglevel=2,
    )
    path.write_bytes(model.getvalue())
    return path


def write_tiktoken(path: Path, *, words: tuple[bytes, ...] = (b"so", b"me", b"some")) -> Path:
    """Write the 256 bytes and a few merges."""
    pytest.importorskip("tiktoken")
    tokens = [bytes([byte]) for byte in range(256)] + list(words)
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    path.write_text("\n".join(lines) + "\n")
    return path
