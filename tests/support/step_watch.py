"""What a rank keeps for backward and what it sends, watched while an engine takes a step."""

from collections import Counter, defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from nvfp4_train.parallel.mesh import Mesh


class _Held:
    """Stands for a saved tensor for as long as autograd's graph keeps it."""

    def __init__(self, tensor: Tensor, watch: "KeptWatch") -> None:
        self.tensor = tensor
        self.key = watch.note(tensor, by=1)
        self.watch = watch

    def __del__(self) -> None:
        self.watch.events.append((self.key, -1))


class KeptWatch:
    """As a context, follows the storages that graphs keep; none is freed before the end, so that none takes the place
    of another.

    What forwards of several microbatches keep is a weight or its codes, and is left out.
    """

    def __init__(self) -> None:
        self.events: list[tuple[int, int]] = []
        self.microbatch = 0
        self._storages: dict[int, UntypedStorage] = {}
        self._sizes: dict[int, int] = {}
        self._users: defaultdict[int, set[int]] = defaultdict(set)
        self._hooks = saved_tensors_hooks(lambda tensor: _Held(tensor, self), lambda held: held.tensor)

    def note(self, tensor: Tensor, *, by: int) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._storages.setdefault(key, storage)
        self._sizes[key] = max(storage.nbytes(), self._sizes.get(key, 0))
        self._users[key].add(self.microbatch)
        self.events.append((key, by))
        return key

    @property
    def peak_bytes(self) -> int:
        """Most bytes that are kept at once."""
        held: Counter[int] = Counter()
        now = peak = 0
        for key, change in self.events:
            if len(self._users[key]) > 1:
                continue
            before, held[key] = held[key], held[key] + change
            now += self._sizes[key] * ((held[key] > 0) - (before > 0))
            peak = max(peak, now)
        return peak

    def __enter__(self) -> "KeptWatch":
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)


class SentWatch(TorchDispatchMode):
    """Adds up the bytes that this rank sends along each axis, as rings send: what it has goes once to each other rank.

    Args:
        mesh: Whose groups they are; what goes over others is under ``other``.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        # An axis can have a group in several views of the ranks.
        parts = [
            ("dp_replicate", mesh.dense["dp_replicate"]),
            ("dp_shard", mesh.dense["fsdp"]),
            ("dp_shard", mesh.expert["efsdp"]),
            ("tp", mesh.dense["tp"]),
            *((axis, mesh._along(axis)) for axis in ("pp", "cp", "tp", "ep")),
        ]
        self._axes = {part.get_group().group_name: axis for axis, part in parts if part.size() > 1}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("c10d::").removeprefix("_c10d_functional::").partition(".")[0]
        if name != func.name().partition(".")[0] and name in _SENT:
            group = _group(args)
            axis = _AXES.get(name) or self._axes.get(group.group_name, "other")
            self.bytes[axis] += _SENT[name](args, group)
        return func(*args, **(kwargs or {}))


def _group(args: Any) -> dist.ProcessGroup:
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return dist.ProcessGroup.unbox(arg)
    return dist.distributed_c10d._resolve_process_group(args[-1])


def _gathered(part: Tensor, group: dist.ProcessGroup) -> float:
    return part.nbytes * (group.size() - 1)


def _scattered(whole: Tensor, group: dist.ProcessGroup) -> float:
    return whole.nbytes * (group.size() - 1) / group.size()


def _exchanged(rows: Tensor, splits: list[int], group: dist.ProcessGroup) -> float:
    return rows.nbytes * (1 - splits[group.rank()] / max(sum(splits), 1))


# Axes of the same ranks may share a group: these operations belong to one of them.
_AXES = {"all_to_all_single": "ep", "_allgather_base_": "dp_shard", "_reduce_scatter_base_": "dp_shard"}
_SENT: dict[str, Any] = {
    "all_gather_into_tensor": lambda args, group: _gathered(args[0], group),
    "reduce_scatter_tensor": lambda args, group: _scattered(args[0], group),
    "all_reduce": lambda args, group: 2 * _scattered(args[0], group),
    "all_to_all_single": lambda args, group: _exchanged(args[0], args[2], group),
    "_allgather_base_": lambda args, group: _gathered(args[1], group),
    "_reduce_scatter_base_": lambda args, group: _scattered(args[1], group),
    "allreduce_": lambda args, group: sum(2 * _scattered(tensor, group) for tensor in args[0]),
    "send": lambda args, group: sum(tensor.nbytes for tensor in args[0]),
}
