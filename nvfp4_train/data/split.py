"""Which text trains and which validates: decided by a hash of each document, so adding text moves no other document."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from nvfp4_train.data.corpus import Document


class Split(StrEnum):
    """A part of the corpus."""

    train = "train"
    validation = "validation"


class SplitMethod(StrEnum):
    """How validation text is chosen."""

    by_document = "by_document"  # a document validates if the hash of its text says so
    by_tail = "by_tail"  # the end of every document validates: for corpora of few documents


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What a first look at the corpus found.

    Args:
        num_documents: Documents that are not empty.
        num_characters: Characters in them.
        method: How validation text is chosen.
    """

    num_documents: int
    num_characters: int
    method: SplitMethod


def survey_documents(documents: Iterable[Document], *, validation_fraction: float) -> Survey:
    """Count documents and choose the method of splitting.

    Documents are split whole, by hash. Where there are too few for that (fewer than ``1 / validation_fraction``, or the
    hash leaves one side empty), the last ``validation_fraction`` of each document validates instead.
    """
    num_documents = num_characters = num_validation = 0
    for document in documents:
        num_documents += 1
        num_characters += len(document.text)
        num_validation += _validates(document, validation_fraction)
    too_few = num_documents * validation_fraction < 1
    one_sided = num_validation in (0, num_documents)
    method = SplitMethod.by_tail if too_few or one_sided else SplitMethod.by_document
    return Survey(num_documents=num_documents, num_characters=num_characters, method=method)


def split_documents(
    documents: Iterable[Document], *, method: SplitMethod, validation_fraction: float
) -> Iterator[tuple[Split, Document]]:
    """Yield every document, or each of its two parts, with the side that it is on."""
    for document in documents:
        match method:
            case SplitMethod.by_document:
                yield (Split.validation if _validates(document, validation_fraction) else Split.train), document
            case SplitMethod.by_tail:
                cut = _tail_start(document.text, validation_fraction)
                for split, text in ((Split.train, document.text[:cut]), (Split.validation, document.text[cut:])):
                    if text:
                        yield split, Document(text=text, digest=document.digest)


def _validates(document: Document, fraction: float) -> bool:
    return int.from_bytes(document.digest[:8], "little") < fraction * 2.0**64


def _tail_start(text: str, fraction: float) -> int:
    """Return where the tail begins: after the last line end before it, if there is one in the half before."""
    cut = len(text) - round(len(text) * fraction)
    line_start = text.rfind("\n", cut // 2, cut) + 1
    return line_start or cut
