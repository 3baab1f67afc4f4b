"""What a model reads in one forward pass."""

from dataclasses import dataclass

import torch
from torch import Tensor

# Labels with this value are not counted in the loss; the default ``ignore_index`` of PyTorch's cross-entropy.
IGNORE_INDEX = -100


@dataclass(kw_only=True, slots=True)
class Batch:
    """One microbatch of one rank.

    Args:
        tokens: [B, S] int64, input token ids.
        labels: [B, S] int64, the next token, or ``IGNORE_INDEX`` where it is not counted.
        document_ids: [B, S] int32; equal values in a row are one document, and values never decrease along a row.
        position_ids: [B, S] int64; counts from 0 at the start of each document and of each row.
        microbatch_index: Global index j of this microbatch in its step. Its first token is row ``j * B * S`` of the
            global batch, whichever rank holds it.
    """

    tokens: Tensor
    labels: Tensor
    document_ids: Tensor
    position_ids: Tensor
    microbatch_index: int

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch on ``device``; copies from pinned memory do not block."""
        return Batch(
            tokens=self.tokens.to(device, non_blocking=True),
            labels=self.labels.to(device, non_blocking=True),
            document_ids=self.document_ids.to(device, non_blocking=True),
            position_ids=self.position_ids.to(device, non_blocking=True),
            microbatch_index=self.microbatch_index,
        )

    def pin_memory(self) -> "Batch":
        """Return the batch in pinned memory."""
        return Batch(
            tokens=self.tokens.pin_memory(),
            labels=self.labels.pin_memory(),
            document_ids=self.document_ids.pin_memory(),
            position_ids=self.position_ids.pin_memory(),
            microbatch_index=self.microbatch_index,
        )

    def num_labels(self) -> Tensor:
        """Return how many labels count, as a 0-dim int64 tensor on the batch's device (no synchronization)."""
        return (self.labels != IGNORE_INDEX).sum()
