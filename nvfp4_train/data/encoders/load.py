"""From the name of a tokenizer to the tokenizer."""

from dataclasses import dataclass
from pathlib import Path

from nvfp4_train.data.encoders.base import Encoder
from nvfp4_train.data.encoders.hugging_face import HuggingFaceEncoder
from nvfp4_train.data.encoders.raw_bytes import ByteEncoder
from nvfp4_train.data.encoders.sentence_piece import SentencePieceEncoder
from nvfp4_train.data.encoders.tiktoken_file import TiktokenEncoder
from nvfp4_train.data.error import DataError

_EXPECTED = (
    "`bytes`, a tokenizer.json or a folder with one (Hugging Face), a .model file (sentencepiece), a .tiktoken file"
)


@dataclass(frozen=True, kw_only=True)
class EncoderSpec:
    """A tokenizer as the user names it.

    Args:
        name: ``bytes``, or a path.
        end_token: Name of the token that ends a document; empty for the tokenizer's own.
        tiktoken_pattern: Pattern of a ``.tiktoken`` file that is no published encoding; empty otherwise.
    """

    name: str
    end_token: str = ""
    tiktoken_pattern: str = ""


def load_encoder(spec: EncoderSpec) -> Encoder:
    """Load a tokenizer.

    Raises:
        DataError: It cannot be loaded, or does not have the end token that was asked for.
    """
    encoder = _load(spec)
    if spec.end_token:
        end = encoder.special_id(spec.end_token)
        if end is None:
            raise DataError(
                spec.name, found=f"no token {spec.end_token!r}", expected="the token that ends a document",
                fix="check --eod-token",
            )  # fmt: skip
        encoder.end_of_document = end
    return encoder


def _load(spec: EncoderSpec) -> Encoder:
    path = Path(spec.name).expanduser()
    if spec.tiktoken_pattern and path.suffix != ".tiktoken":
        raise DataError(
            spec.name, found="a pattern for a tokenizer that is no .tiktoken file", expected="a .tiktoken file",
            fix="leave out --tiktoken-pattern",
        )  # fmt: skip
    if spec.name == "bytes":
        return ByteEncoder()
    if path.is_dir():
        path = _file_in(path)
    if not path.is_file():
        raise DataError(spec.name, found="nothing there", expected=_EXPECTED, fix="check the path")
    match path.suffix.lower():
        case ".json":
            return HuggingFaceEncoder(path, name=spec.name)
        case ".model":
            return SentencePieceEncoder(path, name=spec.name)
        case ".tiktoken":
            return TiktokenEncoder(path, name=spec.name, pattern=spec.tiktoken_pattern)
    raise DataError(spec.name, found=f"a file of type {path.suffix!r}", expected=_EXPECTED, fix="check the path")


def _file_in(folder: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer.model"):
        if (folder / name).is_file():
            return folder / name
    raise DataError(
        folder, found="neither tokenizer.json nor tokenizer.model", expected=_EXPECTED, fix="check the path"
    )
