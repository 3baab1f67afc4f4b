"""Agreement of ranks that hold parts of one GEMM operand on its largest magnitude, before they quantize it."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from nvfp4_train.precision.experts import QuantizedExperts
from nvfp4_train.precision.linear import QuantizedLinear
from nvfp4_train.precision.operands import OPERAND_PLACES

_ops = torch.ops._c10d_functional


class AmaxAgreement:
    """The `reduce_amax` of a Linear whose tokens, inputs or outputs are spread over ranks.

    An operand is a matrix whose rows and columns count two of the three. The amax of the whole matrix is that of all
    ranks that hold a part; an amax per row is that of the ranks that hold other columns of the row, while other rows
    are the business of their own ranks.

    Args:
        before: What the ranks agreed on so far.
        spread: What the ranks of `group` hold parts of: `tokens`, `inputs` or `outputs`.
        group: The ranks.
    """

    def __init__(self, before: Callable[[str, Tensor], Tensor], *, spread: str, group: dist.ProcessGroup) -> None:
        self._before = before
        self._spread = spread
        self._group = group

    def __call__(self, name: str, amax: Tensor) -> Tensor:
        """Return the agreed amax of the operand `name`, fp32 [1] or [R]."""
        amax = self._before(name, amax)
        place, is_whole = OPERAND_PLACES[name], amax.numel() == 1
        if place.columns == self._spread or (is_whole and place.rows == self._spread):
            return _largest(amax, self._group)
        return amax


def agree_on_amax(module: QuantizedLinear | QuantizedExperts, *, spread: str, group: dist.ProcessGroup) -> None:
    """Let the ranks of `group` agree on every amax of the operands that they hold parts of; in place, per axis once."""
    module.reduce_amax = AmaxAgreement(module.reduce_amax, spread=spread, group=group)


def _largest(amax: Tensor, group: dist.ProcessGroup) -> Tensor:
    # As integers the bits of numbers that are not negative have the same order, with NaN above infinity; a maximum of
    # floats would lose a NaN.
    bits = amax.abs().view(torch.int32)
    return _ops.wait_tensor(_ops.all_reduce(bits, "max", group.group_name)).view(torch.float32)
