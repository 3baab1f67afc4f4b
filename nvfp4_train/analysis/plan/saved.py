"""What a forward keeps for its backward, found by running it and looking at what autograd saves.

Nothing here repeats what modules save, so nothing has to change when they do. On the meta device a block of any width
runs in milliseconds and without memory.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from nvfp4_train.config.parallel import ActivationCheckpoint
from nvfp4_train.model.linear import GroupedLinear
from nvfp4_train.parallel.activation import KEPT_OPERATIONS
from nvfp4_train.precision.experts import QuantizedExperts
from nvfp4_train.precision.linear import QuantizedLinear


class SavedStorages:
    """Collects, as a context, the storages that autograd saves and that selective checkpointing keeps, each once.

    They are held, so that no later one takes the place of one that is gone.

    Args:
        checkpoint: With ``selective``, results of the operations that it keeps are collected too.
    """

    def __init__(self, checkpoint: ActivationCheckpoint) -> None:
        self.storages: dict[int, UntypedStorage] = {}
        self._hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._mode = _KeptResults(self.add) if checkpoint is ActivationCheckpoint.selective else None

    def add(self, tensor: Tensor) -> None:
        """Take note of a tensor's storage."""
        storage = tensor.untyped_storage()
        self.storages[storage._cdata] = storage

    def _pack(self, tensor: Tensor) -> Tensor:
        self.add(tensor)
        return tensor

    def __enter__(self) -> "SavedStorages":
        self._hooks.__enter__()
        if self._mode is not None:
            self._mode.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._mode is not None:
            self._mode.__exit__(*error)
        self._hooks.__exit__(*error)


class _KeptResults(TorchDispatchMode):
    """Tells of the results of the operations that selective checkpointing does not repeat."""

    def __init__(self, add: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.add = add

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.name().partition(".")[0] in KEPT_OPERATIONS:
            for tensor in result if isinstance(result, tuple | list) else (result,):
                if isinstance(tensor, Tensor):
                    self.add(tensor)
        return result


class FlashAttention(TorchFunctionMode):
    """Chooses, on the meta device, the attention that accelerators run: it keeps no matrix of all pairs of tokens."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return torch.ops.aten._scaled_dot_product_flash_attention(*args[:3], 0.0, True)[0]
        return func(*args, **(kwargs or {}))


def kept_bytes(run: Callable[[], object], *, checkpoint: ActivationCheckpoint, shared: Iterable[Tensor]) -> int:
    """Return what each call of a forward keeps of its own.

    It is called twice, and what both save is not counted: weights, and their codes, which all microbatches share.

    Args:
        run: Makes new inputs and returns what holds the graph.
        checkpoint: How the blocks in it are checkpointed already.
        shared: Tensors that are kept anyway, such as parameters.
    """
    first, second = SavedStorages(checkpoint), SavedStorages(checkpoint)
    with first:
        graph = run()
    with second:
        other = run()
    known = {tensor.untyped_storage()._cdata for tensor in shared} | first.storages.keys()
    del graph, other
    return sum(storage.nbytes() for key, storage in second.storages.items() if key not in known)


class _AnyExpert(nn.Module):
    """All experts as one Linear: what is kept depends on how many rows there are, not on whose they are."""

    def __init__(self, linear: QuantizedLinear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return self.linear(x)


def merge_experts(model: nn.Module) -> None:
    """Let the experts of a model on the meta device run without knowing how many tokens each gets."""
    for name, module in list(model.named_modules()):
        if isinstance(module, QuantizedExperts):
            plain = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
            linear = QuantizedLinear.from_linear(plain, precision=module.precision, position=module.position)
            model.set_submodule(name, _AnyExpert(linear))
        elif isinstance(module, GroupedLinear):
            raise AssertionError(f"{name} did not go through the precision pass")
