import pytest
import torch
import torch.nn.functional as F

from nvfp4_train.model.norm import GatedRMSNorm, RMSNorm


def normalize(x, *, eps):
    return x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt()


def fill(module):
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        module.weight.copy_(torch.randn(module.weight.shape, generator=rng))
    return module


def test_rms_norm_definition():
    norm, x = fill(RMSNorm(8, eps=1e-3)).double(), torch.randn(3, 8, dtype=torch.float64)
    torch.testing.assert_close(norm(x), normalize(x, eps=1e-3) * norm.weight)


@pytest.mark.parametrize("group_width", [4, 12])
def test_gated_norm_definition_and_gradients(group_width):
    norm = fill(GatedRMSNorm(12, group_width=group_width, eps=1e-3)).double()
    x, gate = torch.randn(2, 2, 5, 12, dtype=torch.float64, requires_grad=True)
    weight = torch.randn_like(x)
    gated = (x * F.silu(gate)).unflatten(-1, (-1, group_width))
    wanted = normalize(gated, eps=1e-3).flatten(-2) * norm.weight
    got = norm(x, gate)
    torch.testing.assert_close(got, wanted)
    leaves = (x, gate, norm.weight)
    for mine, theirs in zip(
        torch.autograd.grad((got * weight).sum(), leaves),
        torch.autograd.grad((wanted * weight).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


def test_norms_compute_in_fp32_and_return_the_activation_dtype():
    x = torch.full((1, 4), 1e-3, dtype=torch.bfloat16)
    norm = fill(RMSNorm(4, eps=0.0))
    expected = (torch.ones(1, 4) * norm.weight).to(
        torch.bfloat16
    )  # not rounded before the multiplication by the weight
    assert norm(x).dtype == torch.bfloat16
    assert torch.equal(norm(x), expected)
    gated = fill(GatedRMSNorm(4, group_width=4, eps=0.0))
    assert torch.equal(gated(x, torch.ones_like(x)), (torch.ones(1, 4) * gated.weight).to(torch.bfloat16))


def test_holders_of_halves_of_a_group_norm_as_one_of_all():
    """The halves are computed in turn, each with the other's means, as an exchange would give them."""
    whole = fill(GatedRMSNorm(12, group_width=12, eps=1e-3)).double()
    x, gate, weight = torch.randn(3, 5, 12, dtype=torch.float64)
    leaves = [tensor.requires_grad_() for tensor in (x, gate)]
    wanted = torch.autograd.grad((whole(x, gate) * weight).sum(), [*leaves, whole.weight])
    squares = (x * F.silu(gate)).detach().square().unflatten(-1, (2, 6)).mean(dim=-1)
    seen: list[torch.Tensor] = []

    def exchange(mean: torch.Tensor, *, half: int) -> torch.Tensor:
        seen.append(mean)
        if len(seen) % 2:  # the sum of squares comes first
            torch.testing.assert_close(mean[:, 0, 0], squares[:, half])
            return squares.mean(dim=-1)[:, None, None].clone()
        return along[:, None, None].clone()

    inverse = (squares.mean(dim=-1) + 1e-3).rsqrt()
    normed = (x * F.silu(gate)).detach() * inverse[:, None]
    along = (weight * whole.weight.detach() * normed).mean(dim=-1)
    for half in range(2):
        channels = slice(6 * half, 6 * half + 6)
        norm = GatedRMSNorm(12, group_width=6, eps=1e-3).double()
        norm.weight = torch.nn.Parameter(whole.weight.detach()[channels].clone())
        norm.mean_over_parts = lambda mean, half=half: exchange(mean, half=half)
        mine = [tensor.detach()[:, channels].requires_grad_() for tensor in leaves]
        y = norm(*mine)
        torch.testing.assert_close(y, whole(x, gate)[:, channels])
        found = torch.autograd.grad((y * weight[:, channels]).sum(), [*mine, norm.weight])
        for got, of_all in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, of_all[..., channels])
    assert len(seen) == 4
