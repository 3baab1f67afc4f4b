"""Numbers about training. Besides ``evaluate`` this is the only module that waits for the device."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nvfp4_train.data.batch import Batch
from nvfp4_train.parallel.local import local_part
from nvfp4_train.parallel.mesh import Mesh
from nvfp4_train.train.state import StepResult, TrainState


@dataclass(frozen=True, kw_only=True, slots=True)
class StepValues:
    """The tensors of a step result as Python numbers, exactly."""

    loss: float
    grad_norm: float


def read_step(result: StepResult) -> StepValues:
    """Wait for a step and read its loss and gradient norm, both in one transfer."""
    loss, grad_norm = torch.stack([result.loss.float(), result.grad_norm.float()]).tolist()
    return StepValues(loss=loss, grad_norm=grad_norm)


def read_scalars(scalars: Mapping[str, Tensor]) -> dict[str, float]:
    """Wait for scalars and read them all in one transfer; FP64 and integers as FP32."""
    if not scalars:
        return {}
    return dict(zip(scalars, torch.stack([value.float() for value in scalars.values()]).tolist(), strict=True))


def count_labels(batches: list[Batch], *, mesh: Mesh) -> Tensor:
    """Count the labels of a step over all ranks, without waiting.

    Returns:
        FP32 scalar on the mesh's device.
    """
    labels = torch.stack([batch.num_labels() for batch in batches]).sum()
    return mesh.sum_over_data(labels.to(mesh.device, torch.float32))


def is_true_on_any_rank(*, flag: bool, mesh: Mesh) -> bool:
    """Return on every rank whether ``flag`` is true on one of them."""
    return bool(mesh.sum_over_ranks(torch.tensor(float(flag), device=mesh.device)).item())


def largest_over_ranks(number: int, *, mesh: Mesh) -> int:
    """Return on every rank the largest ``number`` that one of them has."""
    return int(mesh.max_over_ranks(torch.tensor(number, device=mesh.device)).item())


def is_finite(tensor: Tensor) -> bool:
    """Wait for a tensor and return whether it has neither NaN nor infinity."""
    return bool(tensor.isfinite().all().item())


def find_non_finite_parameter(model: nn.Module) -> str | None:
    """Wait for the device and name the first parameter of which this rank holds a NaN or an infinity."""
    # What a rank does not hold another one looks at.
    return first_non_finite({name: local_part(value) for name, value in model.named_parameters()})


def first_non_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Wait for the tensors, in one transfer, and name the first one that holds a NaN or an infinity."""
    if not tensors:
        return None
    finite = torch.stack([tensor.isfinite().all() for tensor in tensors.values()]).tolist()
    return next((name for name, is_good in zip(tensors, finite, strict=True) if not is_good), None)


class Stopwatch:
    """Training time: the wall clock, less what evaluation and saving take.

    Args:
        clock: Seconds since some moment.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._started = clock()
        self._paused = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of training since the stopwatch was made."""
        return self._clock() - self._started - self._paused

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time inside the block; work still queued on the device counts as training."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        before = self._clock()
        try:
            yield
        finally:
            self._paused += self._clock() - before


class Throughput:
    """Tokens per second of training between two calls."""

    def __init__(self, *, tokens: int, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch
        self._tokens = tokens
        self._seconds = stopwatch.seconds

    def lap(self, state: TrainState) -> float:
        """Return the throughput since the last call, over all ranks together."""
        seconds = self._stopwatch.seconds
        tokens_per_second = (state.tokens - self._tokens) / (seconds - self._seconds)
        self._tokens, self._seconds = state.tokens, seconds
        return tokens_per_second
