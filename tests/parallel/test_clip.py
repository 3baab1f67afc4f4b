import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from nvfp4_train.parallel.clip import clip_gradients, global_grad_norm
from nvfp4_train.parallel.mesh import build_mesh
from nvfp4_train.parallel.runtime import Runtime
from tests.support.ranks import run_on_ranks
from tests.support.tiny import parallel_layout


def parameter_with_gradient(gradient: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return parameter


def gradients() -> list[Tensor]:
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(5, 3, generator=rng), torch.randn(7, generator=rng), torch.randn(1, generator=rng) * 10]


def reference_norm() -> float:
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients()))


def test_norm_is_that_of_all_gradients_in_one_vector():
    parameters = [*map(parameter_with_gradient, gradients()), nn.Parameter(torch.ones(3))]
    norm = global_grad_norm(parameters)
    assert norm.dtype is torch.float32
    assert norm.item() == pytest.approx(reference_norm(), rel=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_norm_is_not_finite_if_one_element_is_not(bad):
    parameters = list(map(parameter_with_gradient, gradients()))
    parameters[1].grad[3] = bad
    assert not global_grad_norm(parameters).isfinite()


def test_clipping_scales_to_the_largest_norm_and_leaves_smaller_ones_alone():
    parameters = list(map(parameter_with_gradient, gradients()))
    norm = global_grad_norm(parameters)
    clip_gradients(parameters, norm=norm, max_norm=2 * norm.item())
    assert all(
        torch.equal(parameter.grad, gradient) for parameter, gradient in zip(parameters, gradients(), strict=True)
    )
    clip_gradients(parameters, norm=norm, max_norm=0.5)
    assert global_grad_norm(parameters).item() == pytest.approx(0.5, rel=1e-5)
    assert torch.allclose(parameters[0].grad, gradients()[0] * 0.5 / norm, rtol=1e-5)


def clip_sharded(runtime: Runtime) -> tuple[float, list[Tensor], float]:
    """Gradients of every layout that a run has: sharded (one rank of the last has nothing), hybrid, replicated,
    plain.
    """
    mesh = build_mesh(parallel_layout(replicate=2), runtime).fsdp_mesh
    layouts = [(Replicate(), Shard(0)), (Replicate(), Replicate()), (Shard(0), Shard(0))]
    parameters = []
    for gradient, layout in zip(gradients(), layouts, strict=True):
        shard = distribute_tensor(torch.zeros_like(gradient), mesh, layout)
        parameters.append(nn.Parameter(shard))
        parameters[-1].grad = distribute_tensor(gradient, mesh, layout)
    norm = global_grad_norm(parameters)
    clip_gradients(parameters, norm=norm, max_norm=1.0)
    clipped = [parameter.grad.full_tensor() for parameter in parameters if isinstance(parameter.grad, DTensor)]
    if runtime.rank in (1, 3):  # one shard, in both of its copies
        parameters[0].grad.to_local()[0, 0] = float("nan")
    return norm.item(), clipped, global_grad_norm(parameters).item()


@pytest.mark.distributed
def test_norm_over_ranks_is_that_of_the_whole_and_equal_on_all():
    results = run_on_ranks(clip_sharded, 4)
    norms = {norm for norm, _, _ in results}
    assert len(norms) == 1
    assert norms.pop() == pytest.approx(reference_norm(), rel=1e-6)
    for _, clipped, poisoned in results:
        assert math.isnan(poisoned)  # the NaN of one shard is everyone's
        for found, gradient in zip(clipped, gradients(), strict=True):
            assert torch.allclose(found, gradient / reference_norm(), rtol=1e-5)
