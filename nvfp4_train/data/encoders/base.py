"""What every tokenizer is to the rest of the program: text to ids and back."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Encoder(Protocol):
    """A tokenizer.

    Text that spells a special token is text; no beginning or end token is added.

    Attributes:
        name: How the user named it.
        digest: Hash of everything that the ids depend on.
        library: Name and version of the library that encodes.
        vocab_size: Every id lies below it.
        end_of_document: Id that ends a document; None if the tokenizer has none.
    """

    name: str
    digest: str
    library: str
    vocab_size: int
    end_of_document: int | None

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, int32 [N]."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some ids; bytes that are not UTF-8 become U+FFFD."""
        ...

    def special_id(self, token: str) -> int | None:
        """Return the id of a special token by its name; None if there is none."""
        ...
