"""The engine made of PyTorch's own parts: FSDP2, fused AdamW, distributed checkpoints."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nvfp4_train.checkpoint.load import load_checkpoint
from nvfp4_train.checkpoint.save import save_checkpoint
from nvfp4_train.checkpoint.state import collect_state
from nvfp4_train.data.batch import Batch
from nvfp4_train.engine.base import BaseEngine
from nvfp4_train.model.hybrid import HybridLM
from nvfp4_train.optim.update import apply_update
from nvfp4_train.parallel.clip import clip_gradients, global_grad_norm
from nvfp4_train.parallel.mesh import Mesh
from nvfp4_train.parallel.runner import Runner
from nvfp4_train.precision.coverage import PrecisionPlan


class TorchEngine(BaseEngine):
    """See `Engine`.

    Args:
        model: What this rank has of it after the parallel pass, with values.
        runner: Runs its forwards and backwards.
        optimizer: Over its parameters.
        mesh: Of all ranks.
        plan: Of the precision pass; this engine alone moves its position.
        max_grad_norm: Largest global gradient norm; 0 does not clip.
    """

    name = "torch"

    def __init__(
        self,
        model: HybridLM,
        *,
        runner: Runner,
        optimizer: Optimizer,
        mesh: Mesh,
        plan: PrecisionPlan,
        max_grad_norm: float,
    ) -> None:
        super().__init__(model, optimizer=optimizer, mesh=mesh, plan=plan)
        self._runner = runner
        self._max_grad_norm = max_grad_norm

    def forward_backward(self, batches: list[Batch], denominator: Tensor) -> Tensor:
        """Add up the gradients of one step; see `Engine`."""
        loss_sum = self._runner.forward_backward(batches, denominator, start=self._start)
        total, self.extra_losses = self._runner.extra.reduce(loss_sum, sum_over_data=self.mesh.sum_over_tokens)
        return total / denominator

    def optimizer_step(self, *, lr: float, weight_decay: float) -> Tensor:
        """Clip the gradients, update the parameters and forget the gradients; see `Engine`."""
        pipeline = self.mesh.group("pp") if self.mesh.degree("pp") > 1 else None
        norm = global_grad_norm(self._runner.parameters_of_norm(), pipeline=pipeline)
        if self._max_grad_norm:
            clip_gradients(self.model.parameters(), norm=norm, max_norm=self._max_grad_norm)
        skip = (~norm.isfinite()).to(torch.float32)
        apply_update(self._optimizer, lr=lr, weight_decay=weight_decay, skip=skip)
        self._end_step(skip=skip)
        return norm

    def save(self, path: Path, metadata: dict[str, Any]) -> None:
        """Save a checkpoint; see `Engine`."""
        state = collect_state(self.model, self._optimizer)
        save_checkpoint(path, state, engine=self.name, step=self.step, metadata=metadata)

    def load(self, path: Path) -> dict[str, Any]:
        """Continue from a checkpoint; see `Engine`."""
        loaded = load_checkpoint(path, collect_state(self.model, self._optimizer), engine=self.name)
        self.step = loaded.step
        self._position.weights_changed()
        return loaded.metadata

    def close(self) -> None:
        """Free gathered weights and gradients."""
        self._runner.reshard()
        self._optimizer.zero_grad(set_to_none=True)

    def _run_forward(self, batch: Batch) -> Tensor:
        return self._runner.evaluate(batch, start=self._start)
