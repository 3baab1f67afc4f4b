"""What a model reports beside the loss of the next token, over all microbatches and data ranks of a step."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor


class ExtraLosses:
    """Adds up the ``extra_losses`` of a step's forwards; nothing waits for a device."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, extra: Mapping[str, Tensor]) -> None:
        """Add those of one forward: name to [2], the sum over labels and the number of labels."""
        for name, value in extra.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def share(self, loss_sum: Tensor, *, names: Sequence[str], sum_over_stages: Callable[[Tensor], Tensor]) -> Tensor:
        """Give every rank of a pipeline the loss and the extra losses of its last stage, in one exchange.

        Args:
            loss_sum: FP32 scalar, 0 where the last stage is elsewhere.
            names: Of the extra losses, in the order of the model.
            sum_over_stages: Sums a tensor over the ranks of the pipeline.

        Returns:
            The loss.
        """
        assert not self._sums or list(self._sums) == list(names)
        nothing = torch.zeros(2, dtype=loss_sum.dtype, device=loss_sum.device)
        own = [self._sums.get(name, nothing).to(loss_sum.dtype) for name in names]
        total = sum_over_stages(torch.cat((loss_sum.detach().reshape(1), *own)))
        self._sums = dict(zip(names, total[1:].unflatten(0, (-1, 2)) if names else (), strict=True))
        return total[0]

    def reduce(
        self, loss_sum: Tensor, *, sum_over_data: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum a loss and the extra losses over the data ranks, in one exchange; every rank has the same names.

        Args:
            loss_sum: FP32 scalar.
            sum_over_data: Sums a tensor over the data ranks.

        Returns:
            The loss, and by name the mean over labels, each a scalar; 0 where no label counted.
        """
        if not self._sums:
            return sum_over_data(loss_sum), {}
        sums = torch.stack([value.to(loss_sum.dtype) for value in self._sums.values()])  # [names, 2]
        total = sum_over_data(torch.cat((loss_sum.reshape(1), sums.flatten())))
        means = (value / count.clamp(min=1) for value, count in total[1:].view_as(sums))
        return total[0], dict(zip(self._sums, means, strict=True))
