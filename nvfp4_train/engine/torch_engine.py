"""The engine made of PyTorch's own parts: FSDP2, fused AdamW, distributed checkpoints."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nvfp4_train.checkpoint.load import load_checkpoint
from nvfp4_train.checkpoint.save import save_checkpoint
from nvfp4_train.checkpoint.state import collect_state
from nvfp4_train.data.batch import Batch
from nvfp4_train.engine.base import Forward, LossSum
from nvfp4_train.model.hybrid import HybridLM
from nvfp4_train.model.router import balance_experts
from nvfp4_train.optim.update import apply_update
from nvfp4_train.parallel.clip import clip_gradients, global_grad_norm
from nvfp4_train.parallel.context import cut_rows, stream_rows
from nvfp4_train.parallel.mesh import Mesh
from nvfp4_train.parallel.runner import Runner
from nvfp4_train.precision.amax_history import end_step
from nvfp4_train.precision.coverage import PrecisionPlan
from nvfp4_train.precision.high_precision import high_precision


class TorchEngine:
    """See `Engine`.

    Args:
        model: What this rank has of it after the parallel pass, with values.
        runner: Runs its forwards and backwards.
        optimizer: Over its parameters.
        mesh: Of all ranks.
        plan: Of the precision pass: the position of its QuantizedLinears, moved by this engine only, and what the
            recipe does after an optimizer step.
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
        self.model = model
        self.mesh = mesh
        self.step = 0
        self.extra_losses: dict[str, Tensor] = {}
        self._runner = runner
        self._optimizer = optimizer
        self._position = plan.position
        self._after_step = plan.after_step
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
        balance_experts(self.model, sum_over_data=self.mesh.sum_over_tokens, skip=skip)
        self.step += 1
        end_step(self.model, largest_over_ranks=self.mesh.max_over_tokens)
        if self._after_step is not None:
            self._after_step(self.model, step=self.step)
        self._position.weights_changed()
        return norm

    @torch.no_grad()
    def evaluate(self, batch: Batch, *, forward: Forward) -> LossSum:
        """Take the loss of one microbatch per rank; see `Engine`."""
        with high_precision(self._position) if forward is Forward.bf16 else nullcontext():
            loss_sum = self._runner.evaluate(batch, start=self._start)
        num_labels = batch.num_labels().to(self.mesh.device)
        return LossSum(loss_sum=self.mesh.sum_over_tokens(loss_sum), num_labels=self.mesh.sum_over_data(num_labels))

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

    def _start(self, batch: Batch) -> Batch:
        """Move the position of all rounding to a microbatch; return it on the device, with this rank's tokens."""
        self._position.start_microbatch(step=self.step, **stream_rows(batch, mesh=self.mesh))
        here = batch.to(self.mesh.device)
        return replace(here, tokens=cut_rows(here.tokens, mesh=self.mesh), labels=cut_rows(here.labels, mesh=self.mesh))
