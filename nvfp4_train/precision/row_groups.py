"""Output features that come in groups, none of which may share a quantization block with another.

The rows of Mamba's in_proj belong to groups of heads, and a group may end inside a block of 16 rows. When such a weight
is quantized, the end of each group is filled up with rows of zeros, so that what a group is rounded to depends neither
on its neighbours nor on which rank holds them. Zeros change no maximum and no sum.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from nvfp4_train.config.recipe import LinearRecipe


@dataclass(frozen=True)
class RowGroups:
    """How the rows of a weight are grouped when it is quantized.

    Args:
        size: Rows of a group; 0: there are no groups, nothing is filled up.
        padding: Rows of zeros after each group.
    """

    size: int = 0
    padding: int = 0

    @classmethod
    def of(cls, size: int, recipe: LinearRecipe) -> "RowGroups":
        """Return the groups of a weight under a recipe; groups that are whole blocks of rows need no filling."""
        if not size or size % recipe.dim_multiple == 0:
            return cls()
        return cls(size, -size % recipe.shard_multiple)

    def pad(self, tensor: Tensor, *, dim: int) -> Tensor:
        """Put zeros after each group of `tensor` [R, C] along `dim`, 0 or 1."""
        if not self.padding:
            return tensor
        filling = (0, self.padding) if dim == 1 else (0, 0, 0, self.padding)
        return F.pad(tensor.unflatten(dim, (-1, self.size)), filling).flatten(dim, dim + 1)

    def crop(self, tensor: Tensor, *, dim: int) -> Tensor:
        """Undo `pad`."""
        if not self.padding:
            return tensor
        groups = tensor.unflatten(dim, (-1, self.size + self.padding))
        return groups.narrow(dim + 1, 0, self.size).flatten(dim, dim + 1)

    def padded_index(self, row: int) -> int:
        """Return where the first row of a group lies among padded groups."""
        return row // self.size * (self.size + self.padding) if self.padding else row


NO_GROUPS = RowGroups()
