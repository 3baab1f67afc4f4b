"""Tokenizers of the Hugging Face library: a ``tokenizer.json``, or a folder that holds one."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import Tokenizer

from nvfp4_train.data.error import DataError
from nvfp4_train.data.manifest import file_digest

# Names under which published tokenizers keep it, for files that do not say.
_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")


class HuggingFaceEncoder:
    """A ``tokenizer.json`` without its post-processing: no added tokens, no truncation, no padding.

    Args:
        path: ``tokenizer.json``.
        name: How the user named it.

    Raises:
        DataError: The file cannot be read.
    """

    def __init__(self, path: Path, *, name: str) -> None:
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise DataError(
                path, found=f"no tokenizer ({error})", expected="a tokenizer.json of the Hugging Face library",
                fix="check the path",
            ) from error  # fmt: skip
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()  # a file may ask for either, which would cut or fill documents silently
        self._tokenizer.no_padding()
        self.name = name
        self.library = f"tokenizers {tokenizers.__version__}"
        self.digest = file_digest(path)
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())  # ids may have gaps
        named = _named_end(path.parent)
        candidates = [named] if named else [token for token in _END_TOKENS if self.special_id(token) is not None]
        self.end_of_document = self.special_id(candidates[0]) if candidates else None

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, int32 [N]."""
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.int32) for encoding in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some ids, special tokens included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def special_id(self, token: str) -> int | None:
        """Return the id of a token by its name."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found


def _named_end(folder: Path) -> str | None:
    """Return the ``eos_token`` of the ``tokenizer_config.json`` beside the tokenizer, if it names one."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return None
    try:
        token = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
    except (ValueError, AttributeError) as error:
        raise DataError(path, found=f"no JSON object ({error})", expected="a JSON object", fix="repair it") from error
    return token.get("content") if isinstance(token, dict) else token
