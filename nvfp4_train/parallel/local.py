"""What a rank holds of a parameter."""

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def local_part(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter, whichever engine sharded it; a plain parameter is the part.

    DeepSpeed's stage 3 leaves the parameter empty and hangs a flat shard on it, padded to the same size on all ranks.
    """
    if isinstance(parameter, DTensor):
        return parameter.to_local()
    shard = getattr(parameter, "ds_tensor", None)
    if shard is None:
        return parameter
    start = dist.get_rank(group=parameter.ds_process_group) * shard.numel()  # type: ignore[attr-defined]
    size: int = parameter.ds_numel  # type: ignore[attr-defined]
    return shard.narrow(0, 0, max(0, min(shard.numel(), size - start)))
