"""Which rows of a fused projection belong to which of its parts."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nvfp4_train.model.attention import Attention
from nvfp4_train.model.mamba2 import Mamba2


@dataclass(frozen=True)
class FusedRows:
    """A matrix stored group-major: each group has `sizes[i]` neighbouring rows of part i.

    Args:
        sizes: Rows of each part in one group; the number of groups follows from the matrix.
    """

    sizes: tuple[int, ...]

    def split(self, matrix: Tensor) -> list[Tensor]:
        """Return the parts [rows of part, N] of [rows, N], or [matrix] where there are no parts."""
        groups = matrix.unflatten(0, (-1, sum(self.sizes)))
        return [part.flatten(0, 1) for part in groups.split(self.sizes, dim=1)]

    def join(self, parts: list[Tensor]) -> Tensor:
        """Undo `split`."""
        groups = [part.unflatten(0, (-1, size)) for part, size in zip(parts, self.sizes, strict=True)]
        return torch.cat(groups, dim=1).flatten(0, 1)


def fused_rows(model: nn.Module) -> dict[str, FusedRows]:
    """Return the parts of every fused projection of `model`, by the name of its weight."""
    found = {}
    for name, module in model.named_modules():
        match module:
            case Attention():
                head = module.cfg.d_head
                found[f"{name}.qkv_proj.weight"] = FusedRows((module.queries_per_group * head, head, head))
            case Mamba2():
                inner, _, heads = module.group_split
                state = module.cfg.d_state
                found[f"{name}.in_proj.weight"] = FusedRows((inner, inner, state, state, heads))  # z, x, B, C, dt
    return found
