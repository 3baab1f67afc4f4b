"""Muon: momentum whose every step is orthogonalized, for matrices; AdamW for the rest."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nvfp4_train.config.optimizer import UpdateScale
from nvfp4_train.optim.adamw import AdamW
from nvfp4_train.optim.fused_rows import FusedRows
from nvfp4_train.optim.newton_schulz import orthogonalize

# Matrices that are updated together: as many as there are momenta in FP32, and updates, beside the parameters.
BATCH_SIZE = 16


@dataclass(frozen=True, kw_only=True)
class MuonRule:
    """How a momentum becomes an update.

    Args:
        momentum: Decay of the momentum.
        steps: Iterations of the orthogonalization.
        dtype: What they are computed in.
        scale: What the result is multiplied by.
    """

    momentum: float
    steps: int
    dtype: torch.dtype
    scale: UpdateScale

    def update_of(self, matrix: Tensor, *, rows: FusedRows | None) -> Tensor:
        """Return the update for a whole momentum [..., M, N]; the parts of a fused one are orthogonalized apart."""
        if rows is not None:
            return rows.join([self.update_of(part, rows=None) for part in rows.split(matrix)])
        return orthogonalize(matrix, steps=self.steps, dtype=self.dtype).mul_(self._scale_of(*matrix.shape[-2:]))

    def _scale_of(self, rows: int, columns: int) -> float:
        match self.scale:
            case UpdateScale.spectral:
                return math.sqrt(max(1.0, rows / columns))
            case UpdateScale.adamw_rms:
                return 0.2 * math.sqrt(max(rows, columns))


class Muon(AdamW):
    """Muon for groups that say `"is_orthogonalized": True`; AdamW for the others.

    Whole matrices are needed for a moment in every step: `Sharding.map_whole` brings the parts together.

    Args:
        groups: Parameter groups; tensors of the orthogonalized ones are [..., M, N].
        rule: How a momentum becomes an update.
        rows: Parts of the fused matrices among them.
        options: As for `AdamW`.

    Source: Keller Jordan et al., https://kellerjordan.github.io/posts/muon/; scale, weight decay and AdamW beside it:
    "Muon is Scalable for LLM Training", https://arxiv.org/abs/2502.16982.
    """

    def __init__(
        self, groups: list[dict[str, Any]], *, rule: MuonRule, rows: dict[nn.Parameter, FusedRows], **options: Any
    ) -> None:
        self._rule = rule
        self._rows = rows
        super().__init__(groups, **options)

    def _new_state(self, parameter: nn.Parameter, group: dict[str, Any]) -> dict[str, Tensor]:
        if not group["is_orthogonalized"]:
            return super()._new_state(parameter, group)
        return {"momentum": self._moment(parameter)}

    def _update_group(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        if not group["is_orthogonalized"]:
            super()._update_group(group, parameters)
            return
        for start in range(0, len(parameters), BATCH_SIZE):
            self._update_matrices(group, parameters[start : start + BATCH_SIZE])

    def _update_matrices(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        local = self._sharding.local
        kept = [local(self.state[parameter]["momentum"]) for parameter in parameters]
        used = self.fetch(kept, parameters)
        directions = []
        for parameter, momentum in zip(parameters, used, strict=True):
            gradient = local(parameter.grad)  # type: ignore[arg-type]
            self._assign(momentum, torch.lerp(gradient, momentum, self._rule.momentum))
            direction = torch.empty_like(parameter)
            torch.lerp(gradient, momentum, self._rule.momentum, out=local(direction))
            directions.append(direction)
        self.give_back(used, kept)
        rules = [partial(self._rule.update_of, rows=self._rows.get(parameter)) for parameter in parameters]
        updates = self._sharding.map_whole(directions, rules)
        for parameter, update in zip(parameters, updates, strict=True):
            master = local(parameter)
            decayed = master * (1 - group["lr"] * group["weight_decay"])
            self._assign(master, decayed.sub_(update, alpha=group["lr"]))

    def _assign(self, target: Tensor, value: Tensor) -> None:
        """Overwrite `target`, or leave it as it is where the step is skipped."""
        target.copy_(value if self.found_inf is None else torch.where(self.found_inf > 0, target, value))
