"""Models of the sentencepiece library."""

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np

from nvfp4_train.data.error import DataError
from nvfp4_train.data.manifest import file_digest


class SentencePieceEncoder:
    """A sentencepiece model; it normalizes text as its own file says, so decoding may differ in white space.

    Args:
        path: The model file.
        name: How the user named it.

    Raises:
        DataError: The file is no model, or the library is missing.
    """

    def __init__(self, path: Path, *, name: str) -> None:
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError as error:
            raise DataError(
                path, found="no library `sentencepiece`", expected="it to be installed",
                fix="pip install 'nvfp4-train[data]'",
            ) from error  # fmt: skip
        try:
            self._model = SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise DataError(
                path, found=f"no model ({error})", expected="a sentencepiece model", fix="check the path"
            ) from error
        self.name = name
        self.library = f"sentencepiece {version('sentencepiece')}"
        self.digest = file_digest(path)
        self.vocab_size = int(self._model.get_piece_size())
        end = int(self._model.eos_id())
        self.end_of_document = end if end >= 0 else None

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, int32 [N]."""
        encoded = self._model.encode(list(texts), out_type=int, add_bos=False, add_eos=False, num_threads=1)
        return [np.asarray(ids, dtype=np.int32) for ids in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some ids; control tokens are left out."""
        return str(self._model.decode(list(ids)))

    def special_id(self, token: str) -> int | None:
        """Return the id of a piece by its name."""
        found = int(self._model.piece_to_id(token))
        return found if self._model.id_to_piece(found) == token else None
