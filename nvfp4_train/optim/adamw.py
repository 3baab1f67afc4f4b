"""AdamW on FP32 masters, with moments in FP32 or BF16, beside the parameters or in the host's memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from nvfp4_train.optim.sharding import Sharding

# Elements whose moments are in FP32 beside the parameters at a time, where they are kept otherwise: 512 MiB for both.
BUCKET_ELEMENTS = 2**26


@dataclass(frozen=True, kw_only=True)
class StateStorage:
    """How moments are kept between steps.

    Args:
        dtype: FP32 or BF16.
        on_host: Whether they live in the host's memory, pinned where parameters do not.
    """

    dtype: torch.dtype = torch.float32
    on_host: bool = False

    def matches(self, parameter: Tensor) -> bool:
        """Whether an update can work on the kept moments themselves."""
        return self.dtype is torch.float32 and not (self.on_host and parameter.device.type != "cpu")


class AdamW(Optimizer):
    """AdamW with decoupled weight decay.

    The update is PyTorch's fused one, in FP32. Where the moments are kept in another form, they are converted a bucket
    at a time; BF16 rounds to nearest. With a 0-dim FP32 tensor `found_inf` as attribute, `step` changes nothing where
    that tensor is 1, without waiting for it.

    Args:
        groups: Parameter groups; masters are FP32.
        betas: Decay of the two moments.
        eps: Added to the root of the second moment.
        storage: How the moments are kept.
        sharding: How to reach the parts of sharded parameters.

    Source: https://arxiv.org/abs/1711.05101; moments in BF16: DeepSeek-V3, https://arxiv.org/abs/2412.19437, 3.3.3.
    """

    found_inf: Tensor | None = None

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        betas: tuple[float, float],
        eps: float,
        storage: StateStorage,
        sharding: Sharding,
    ) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0, "betas": betas, "eps": eps})
        self._storage = storage
        self._sharding = sharding
        self.allocate_state()

    def allocate_state(self) -> None:
        """Create the state of every parameter that has none, so that every checkpoint has the same layout."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if not self.state[parameter]:
                    self.state[parameter] = self._new_state(parameter, group)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient; a closure is not supported."""
        assert closure is None
        self.allocate_state()
        for group in self.param_groups:
            self._update_group(group, [parameter for parameter in group["params"] if parameter.grad is not None])

    def _new_state(self, parameter: nn.Parameter, group: dict[str, Any]) -> dict[str, Tensor]:
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        return {"step": step, "exp_avg": self._moment(parameter), "exp_avg_sq": self._moment(parameter)}

    def _moment(self, parameter: nn.Parameter) -> Tensor:
        device = torch.device("cpu") if self._storage.on_host else parameter.device
        return self._sharding.zeros_like(parameter, dtype=self._storage.dtype, device=device)

    def _update_group(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        for bucket in self._buckets(parameters):
            states = [self.state[parameter] for parameter in bucket]
            kept = {key: [self._sharding.local(state[key]) for state in states] for key in ("exp_avg", "exp_avg_sq")}
            used = {key: self.fetch(tensors, bucket) for key, tensors in kept.items()}
            adamw(
                [self._sharding.local(parameter) for parameter in bucket],
                [self._sharding.local(parameter.grad) for parameter in bucket],  # type: ignore[arg-type]
                used["exp_avg"],
                used["exp_avg_sq"],
                [],
                [state["step"] for state in states],
                fused=True,
                found_inf=self.found_inf,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            for key, tensors in kept.items():
                self.give_back(used[key], tensors)

    def fetch(self, kept: list[Tensor], parameters: list[nn.Parameter]) -> list[Tensor]:
        """Return kept moments in FP32 beside their parameters; themselves, where they are that already."""
        return [
            moment.to(parameter.device, torch.float32, non_blocking=True)
            for moment, parameter in zip(kept, parameters, strict=True)
        ]

    def give_back(self, used: list[Tensor], kept: list[Tensor]) -> None:
        """Keep the new values of moments from `fetch`."""
        for new, moment in zip(used, kept, strict=True):
            if new.data_ptr() != moment.data_ptr():
                moment.copy_(new, non_blocking=True)

    def _buckets(self, parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        if parameters and self._storage.matches(parameters[0]):
            yield parameters
            return
        bucket: list[nn.Parameter] = []
        size = 0
        for parameter in parameters:
            elements = self._sharding.local(parameter).numel()
            if bucket and size + elements > BUCKET_ELEMENTS:
                yield bucket
                bucket, size = [], 0
            bucket.append(parameter)
            size += elements
        if bucket:
            yield bucket
