"""Pipelines through `torch.distributed.pipelining`: the stages of a rank, and the schedule that runs them.

PyTorch's schedules decide the order and move activations and their gradients. Ours are what a stage computes, when
FSDP exchanges gradients, and how the gradients of weights are kept apart: PyTorch would run a second backward over
the same graph for them, in which every custom function computes both of its gradients once more.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.distributed.tensor import DTensor

from nvfp4_train.config.batch import BatchConfig
from nvfp4_train.config.parallel import ParallelConfig
from nvfp4_train.config.pipeline import PipelineSchedule, step_problems
from nvfp4_train.config.problem import require
from nvfp4_train.data.batch import Batch
from nvfp4_train.model.hybrid import HybridLM
from nvfp4_train.model.model_part import ModelPart, boundary_values, embeds_at_end, extra_loss_names
from nvfp4_train.parallel.extra_losses import ExtraLosses
from nvfp4_train.parallel.fsdp import prepare_backward, reduce_gradients, reshard
from nvfp4_train.parallel.mesh import Mesh
from nvfp4_train.parallel.runner import StartMicrobatch, model_inputs
from nvfp4_train.parallel.stages import StagePlan
from nvfp4_train.precision.deferred_gradients import DeferredGradients

_Schedule = PipelineScheduleSingle | PipelineScheduleMulti
_APART = (PipelineSchedule.zero_bubble, PipelineSchedule.zbv)


def check_microbatches(batch_cfg: BatchConfig, cfg: ParallelConfig, mesh: Mesh) -> None:
    """Check that the schedule can run the microbatches of every step size of a run.

    Raises:
        ConfigError: naming the sizes that do not fit.
    """
    problems = step_problems(
        batch_cfg, schedule=cfg.pipeline_schedule, pp_degree=mesh.degree("pp"), dp_degree=mesh.dp_degree
    )
    require([problem.below("batch") for problem in problems])


@dataclass(frozen=True, kw_only=True)
class RankParts:
    """What one rank has of a model; nothing is copied: all hold modules of the whole.

    Args:
        model: All of it, under the names of the whole.
        stages: Each of its stages.
        plans: Of all stages, those of other ranks included.
    """

    model: ModelPart
    stages: list[ModelPart]
    plans: Sequence[StagePlan]


def take_parts(model: HybridLM, plans: Sequence[StagePlan], *, rank: int) -> RankParts:
    """Return what a rank has of a model.

    Args:
        model: Whole, on the meta device.
        plans: Of all stages.
        rank: Place along the axis `pp`.
    """
    own = [plan for plan in plans if plan.rank == rank]
    stages = [ModelPart(model, blocks=plan.blocks, is_first=plan.is_first, is_last=plan.is_last) for plan in own]
    if len(stages) == 1:
        return RankParts(model=stages[0], stages=stages, plans=plans)
    together = ModelPart(
        model,
        blocks=[block for plan in own for block in plan.blocks],
        is_first=any(plan.is_first for plan in own),
        is_last=any(plan.is_last for plan in own),
    )
    return RankParts(model=together, stages=stages, plans=plans)


class PipelineRunner:
    """Runs the stages of this rank; see `Runner`.

    Args:
        parts: From `take_parts`, after the parallel pass.
        mesh: Of all ranks.
        schedule: Order of the microbatches.
        keeps_gathered: Whether a microbatch uses the weights that the one before it gathered.
        sequence_shards: Ranks that hold different tokens of the residual stream between two blocks, beyond those that
            a batch is divided over already (sequence parallelism).
    """

    def __init__(
        self,
        parts: RankParts,
        *,
        mesh: Mesh,
        schedule: PipelineSchedule,
        keeps_gathered: bool,
        sequence_shards: int = 1,
    ) -> None:
        self._model = parts.model
        self._mesh = mesh
        self._group = mesh.group("pp")
        self._owners = [plan.rank for plan in parts.plans]
        own = [plan for plan in parts.plans if plan.rank == mesh.rank("pp")]
        self._stages = list(zip(own, parts.stages, strict=True))
        self._schedule_kind = schedule
        self._keeps_gathered = keeps_gathered
        self._sequence_shards = sequence_shards
        self._deferred = {plan.index: DeferredGradients(part).take for plan, part in self._stages if schedule in _APART}
        self._running: tuple[tuple[int, torch.Size], list[_Stage], _Schedule] | None = None
        self._denominator = torch.ones(())
        self.extra = ExtraLosses()

    def forward_backward(self, batches: Sequence[Batch], denominator: Tensor, *, start: StartMicrobatch) -> Tensor:
        """Run the schedule; see `Runner`. Loss and extra losses are known on every rank of the pipeline."""
        self._denominator = denominator
        self.extra = ExtraLosses()
        for _, part in self._stages:
            prepare_backward(part, is_last=False, keeps_gathered=self._keeps_gathered)
        stages, schedule = self._schedule_for(len(batches), start(batches[0]).tokens.shape)
        for stage in stages:
            stage.batches, stage.start, stage.loss_sum = batches, start, torch.zeros_like(denominator)
            stage.extra = self.extra
        # Every stage reads its own batches; a target is only what makes the schedule ask for a loss.
        schedule.step(target=torch.zeros(len(batches)), return_outputs=False)
        self._exchange_embedding_gradients()
        loss_sum = torch.stack([stage.loss_sum for stage in stages]).sum()
        names = extra_loss_names(self._model.cfg)
        return self.extra.share(loss_sum, names=names, sum_over_stages=self._share)

    def evaluate(self, batch: Batch, *, start: StartMicrobatch) -> Tensor:
        """Send one microbatch through all stages; see `Runner`."""
        loss_sum = torch.zeros((), device=self._mesh.device)
        values: tuple[Tensor, ...] = ()
        for plan, part in self._stages:
            local = start(batch)
            if not plan.is_first and self._owners[plan.index - 1] != plan.rank:
                values = self._empty_values(local.tokens.shape)
                for value in values:
                    dist.recv(value, group=self._group, group_src=self._owners[plan.index - 1])
            found = part(*values, **model_inputs(local))
            if plan.is_last:
                loss_sum = found
                continue
            values = found if isinstance(found, tuple) else (found,)
            if self._owners[plan.index + 1] != plan.rank:
                for value in values:
                    dist.send(value, group=self._group, group_dst=self._owners[plan.index + 1])
        self.reshard()
        return self._share(loss_sum)

    def parameters_of_norm(self) -> list[nn.Parameter]:
        """Return this rank's parameters, less an embedding that the first stage counts."""
        shared = self._shared_embedding()
        is_counted_elsewhere = shared is not None and not self._model.is_first
        return [p for p in self._model.parameters() if not (is_counted_elsewhere and p is shared)]

    def reshard(self) -> None:
        """Free all gathered weights."""
        for _, part in self._stages:
            reshard(part)

    def _schedule_for(self, num_microbatches: int, shape: torch.Size) -> tuple[list["_Stage"], _Schedule]:
        """Return stages and schedule for steps of this many microbatches; they change with a batch-size ramp only."""
        if self._running is None or self._running[0] != (num_microbatches, shape):
            stages = [self._stage(plan, part, shape) for plan, part in self._stages]
            schedule = _build_schedule(self._schedule_kind, stages, num_microbatches, self._loss)
            self._running = ((num_microbatches, shape), stages, schedule)
        return self._running[1:]

    def _stage(self, plan: StagePlan, part: ModelPart, shape: torch.Size) -> "_Stage":
        values = self._empty_values(shape)
        return _Stage(
            _Hidden(part),
            plan.index,
            len(self._owners),
            self._mesh.device,
            # Said here: PyTorch would find them out by a forward and a backward that count as real ones.
            input_args=() if plan.is_first else values,
            output_args=torch.empty((), device=self._mesh.device, requires_grad=True) if plan.is_last else values,
            group=self._group,
            dw_builder=self._deferred.get(plan.index),
        )

    def _empty_values(self, shape: torch.Size) -> tuple[Tensor, ...]:
        return boundary_values(
            self._model.cfg,
            shape=(shape[0], shape[1] // self._sequence_shards),
            compute_dtype=self._model.compute_dtype,
            device=self._mesh.device,
        )

    def _loss(self, loss_sum: Tensor, target: Tensor) -> Tensor:
        return loss_sum / self._denominator

    def _share(self, values: Tensor) -> Tensor:
        """Return on every rank what the last stage knows; the others pass zeros."""
        total = values.clone()
        dist.all_reduce(total, group=self._group)
        return total

    def _shared_embedding(self) -> Tensor | None:
        """Return the weight that the first and the last stage both have, where this rank has one of them."""
        if not embeds_at_end(self._model.cfg) or self._model.embedding is None:
            return None
        return self._model.embedding.weight

    def _exchange_embedding_gradients(self) -> None:
        """Give both ends of the model the sum of their gradients; equal updates then keep the two copies equal."""
        shared = self._shared_embedding()
        if shared is None:
            return
        assert shared.grad is not None
        own = shared.grad.to_local() if isinstance(shared.grad, DTensor) else shared.grad
        if own.numel() == 0:  # of an uneven shard, alike at both ends
            return
        other = torch.empty_like(own)
        peer = self._owners[-1] if self._model.is_first else self._owners[0]
        exchange = [
            dist.P2POp(dist.isend, own, group=self._group, group_peer=peer),
            dist.P2POp(dist.irecv, other, group=self._group, group_peer=peer),
        ]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        own += other


class _Hidden(nn.Module):
    """Calls a part of a model without showing that it is sharded: PyTorch would gather all of it for a whole step."""

    def __init__(self, part: ModelPart) -> None:
        super().__init__()
        self.part = part

    def forward(self, *stream: Tensor, **inputs: Tensor) -> Any:
        return self.part(*stream, **inputs)


class _Stage(PipelineStage):
    """A stage that moves to its microbatch before each forward and exchanges gradients once per step.

    Attributes:
        batches: Microbatches of the step.
        start: See `StartMicrobatch`.
        loss_sum: Of the microbatches so far, if it is the last stage.
        extra: What the model reported beside it.
    """

    batches: Sequence[Batch]
    start: StartMicrobatch
    loss_sum: Tensor
    extra: ExtraLosses

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,  # noqa: FBT001, FBT002 - the signature is PyTorch's
    ) -> Any:
        """Run the forward of one microbatch, which this stage reads itself."""
        inputs = model_inputs(self.start(self.batches[fwd_chunk_id]))
        output = super().forward_one_chunk(fwd_chunk_id, (), inputs, save_forward_output)
        if self.is_last:
            self.loss_sum = self.loss_sum + output.detach()
            part = self.submod.get_submodule("part")
            assert isinstance(part, ModelPart)
            self.extra.add(part.extra_losses)
        return output

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Exchange gradients with the data ranks; called once, after the last backward of the step."""
        assert grad_scale_factor == 1
        reduce_gradients(self.submod.get_submodule("part"))


def _build_schedule(
    kind: PipelineSchedule, stages: list[Any], num_microbatches: int, loss: Callable[[Tensor, Tensor], Tensor]
) -> _Schedule:
    options: dict[str, Any] = {"loss_fn": loss, "scale_grads": False}
    match kind:
        case PipelineSchedule.gpipe:
            return ScheduleGPipe(stages[0], num_microbatches, **options)
        case PipelineSchedule.interleaved:
            return ScheduleInterleaved1F1B(stages, num_microbatches, **options)
        case PipelineSchedule.zero_bubble:
            return ScheduleInterleavedZeroBubble(stages, num_microbatches, **options)
        case PipelineSchedule.zbv:
            return ScheduleZBVZeroBubble(stages, num_microbatches, **options)
    return Schedule1F1B(stages[0], num_microbatches, **options)
