"""Bytes as tokens: no file, no training, 257 ids."""

from collections.abc import Sequence

import numpy as np

_END_OF_DOCUMENT = 256


class ByteEncoder:
    """Ids 0 to 255 are the bytes of UTF-8, id 256 ends a document."""

    name = "bytes"
    digest = "bytes"
    library = "none"
    vocab_size = 257
    end_of_document: int | None = _END_OF_DOCUMENT

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the bytes of each text, int32 [N]."""
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some bytes; the end of a document is left out."""
        return bytes(token for token in ids if token != _END_OF_DOCUMENT).decode(errors="replace")

    def special_id(self, token: str) -> int | None:
        """Return the id of ``<|endoftext|>``, the only special token."""
        return _END_OF_DOCUMENT if token == "<|endoftext|>" else None
