"""The engine made of PyTorch's own parts: FSDP2, fused AdamW, distributed checkpoints."""

from contextlib import nullcontext
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
from nvfp4_train.engine.extra_losses import ExtraLosses
from nvfp4_train.model.hybrid import HybridLM
from nvfp4_train.model.router import balance_experts
from nvfp4_train.optim.update import apply_update
from nvfp4_train.parallel.clip import clip_gradients, global_grad_norm
from nvfp4_train.parallel.context import cut_rows, stream_rows
from nvfp4_train.parallel.fsdp import prepare_backward, reshard
from nvfp4_train.parallel.mesh import Mesh
from nvfp4_train.precision.amax_history import end_step
from nvfp4_train.precision.coverage import PrecisionPlan
from nvfp4_train.precision.high_precision import high_precision


class TorchEngine:
    """See `Engine`.

    Args:
        model: After the parallel pass, with values.
        optimizer: Over its parameters.
        mesh: Of all ranks.
        plan: Of the precision pass: the position of its QuantizedLinears, moved by this engine only, and what the
            recipe does after an optimizer step.
        max_grad_norm: Largest global gradient norm; 0 does not clip.
        keeps_weights_gathered: Whether a microbatch uses the weights that the one before it gathered.
    """

    name = "torch"

    def __init__(
        self,
        model: HybridLM,
        *,
        optimizer: Optimizer,
        mesh: Mesh,
        plan: PrecisionPlan,
        max_grad_norm: float,
        keeps_weights_gathered: bool,
    ) -> None:
        self.model = model
        self.mesh = mesh
        self.step = 0
        self.extra_losses: dict[str, Tensor] = {}
        self._optimizer = optimizer
        self._position = plan.position
        self._after_step = plan.after_step
        self._max_grad_norm = max_grad_norm
        self._keeps_weights_gathered = keeps_weights_gathered

    def forward_backward(self, batches: list[Batch], denominator: Tensor) -> Tensor:
        """Add up the gradients of one step; see `Engine`."""
        total = torch.zeros((), device=self.mesh.device)
        extra = ExtraLosses()
        for index, batch in enumerate(batches):
            is_last = index == len(batches) - 1
            prepare_backward(self.model, is_last=is_last, keeps_gathered=self._keeps_weights_gathered)
            loss_sum = self._forward(batch)
            (loss_sum / denominator).backward()
            total += loss_sum.detach()
            extra.add(self.model.extra_losses)
        total, self.extra_losses = extra.reduce(total, sum_over_data=self.mesh.sum_over_tokens)
        return total / denominator

    def optimizer_step(self, *, lr: float, weight_decay: float) -> Tensor:
        """Clip the gradients, update the parameters and forget the gradients; see `Engine`."""
        parameters = list(self.model.parameters())
        norm = global_grad_norm(parameters)
        if self._max_grad_norm:
            clip_gradients(parameters, norm=norm, max_norm=self._max_grad_norm)
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
            loss_sum = self._forward(batch)
        # Without a backward nothing else frees the gathered weights, and the next forward would use them even after a
        # load.
        reshard(self.model)
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
        reshard(self.model)
        self._optimizer.zero_grad(set_to_none=True)

    def _forward(self, batch: Batch) -> Tensor:
        """Return the sum of the cross-entropy over this rank's tokens of a microbatch."""
        self._position.start_microbatch(step=self.step, **stream_rows(batch, mesh=self.mesh))
        here = batch.to(self.mesh.device)
        return self.model(
            cut_rows(here.tokens, mesh=self.mesh),
            document_ids=here.document_ids,
            position_ids=here.position_ids,
            labels=cut_rows(here.labels, mesh=self.mesh),
        )
