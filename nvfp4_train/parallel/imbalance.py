"""How unevenly the experts of the whole model were loaded, whichever ranks have its routers."""

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nvfp4_train.model.hybrid import HybridLM
from nvfp4_train.model.model_part import router_names
from nvfp4_train.model.router import max_violations
from nvfp4_train.parallel.mesh import Mesh


def expert_imbalance(model: nn.Module, *, mesh: Mesh) -> dict[str, Tensor]:
    """Return `max_violations` of all routers, those of other pipeline stages included; all ranks must call it.

    Args:
        model: What this rank has of it, after an optimizer step.
        mesh: Of all ranks.
    """
    own = max_violations(model)
    if mesh.degree("pp") == 1:
        return own
    names = router_names(cast(HybridLM, model).cfg)
    assert own.keys() <= set(names)
    if not names:
        return {}
    elsewhere = torch.zeros((), device=mesh.device)
    values = torch.stack([own.get(name, elsewhere) for name in names])  # each router is on one rank of a pipeline
    dist.all_reduce(values, group=mesh.group("pp"))
    return dict(zip(names, values, strict=True))
