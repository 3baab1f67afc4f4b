"""Where the documents of a batch lie: what every mixer needs to keep them apart."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Documents:
    """The documents packed into the rows of a batch.

    Args:
        ids: [B, S] int; tokens of one document are neighbours and share an id.
        positions: [B, S] int64; position of each token in its document.
        one_per_row: Whether every row is known to hold a single document, so that masks may be left out. False is
            always correct.
    """

    ids: Tensor
    positions: Tensor
    one_per_row: bool

    def causal_mask(self) -> Tensor:
        """Return [B, S, S] bool: may the query (dim 1) see the key (dim 2)?"""
        size = self.ids.shape[1]
        causal = torch.ones(size, size, dtype=torch.bool, device=self.ids.device).tril()
        return (self.ids[:, :, None] == self.ids[:, None, :]) & causal


def locate_documents(document_ids: Tensor, position_ids: Tensor | None = None) -> Documents:
    """Prepare the document layout of a batch once for all blocks.

    Only a CPU tensor is inspected for ``one_per_row``: elsewhere that would wait for the device.

    Args:
        document_ids: [B, S] int; equal for tokens of one document, which are neighbours.
        position_ids: [B, S] int64; derived from the ids if None.

    Raises:
        ValueError: if the shapes differ.
    """
    if position_ids is None:
        position_ids = _positions_in_document(document_ids)
    if position_ids.shape != document_ids.shape:
        raise ValueError(
            f"position_ids {tuple(position_ids.shape)} must be shaped like document_ids {tuple(document_ids.shape)}"
        )
    one_per_row = document_ids.device.type == "cpu" and bool((document_ids == document_ids[:, :1]).all())
    return Documents(ids=document_ids, positions=position_ids, one_per_row=one_per_row)


def _positions_in_document(document_ids: Tensor) -> Tensor:
    index = torch.arange(document_ids.shape[1], device=document_ids.device).expand(document_ids.shape)
    is_start = torch.ones_like(document_ids, dtype=torch.bool)
    is_start[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    start = torch.where(is_start, index, 0).cummax(dim=1).values
    return index - start
