from dataclasses import replace

import pytest
import torch

from nvfp4_train.config.moe import Activation, RouterScore
from nvfp4_train.model.documents import locate_documents
from nvfp4_train.model.mlp import activate
from nvfp4_train.model.moe import Moe, Penalized
from tests.support.models import TINY_MOE, document_ids

D_MODEL = 16
DOCUMENTS = locate_documents(document_ids(12, rows=2))


def make_moe(**changes) -> Moe:
    torch.manual_seed(0)
    moe = Moe(replace(TINY_MOE, **changes), d_model=D_MODEL)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return moe.double()


def reference(moe: Moe, h: torch.Tensor) -> torch.Tensor:
    """One token, one expert at a time."""
    cfg = moe.router.cfg
    out = torch.zeros_like(h)
    for place in torch.cartesian_prod(*(torch.arange(size) for size in h.shape[:-1])):
        token = h[tuple(place)]
        scores = token @ moe.router.weight.T
        scores = scores.sigmoid() if cfg.score is RouterScore.sigmoid else scores.softmax(-1)
        chosen = (scores + moe.router.e_score_correction_bias).topk(cfg.top_k).indices
        weights = scores[chosen] / scores[chosen].sum() * cfg.routed_scaling
        x = token if moe.fc1_latent_proj is None else moe.fc1_latent_proj.weight @ token
        total = torch.zeros_like(x)
        for weight, expert in zip(weights, chosen, strict=True):
            experts = moe.experts
            gate = None if experts.gate_proj is None else experts.gate_proj.weight[expert] @ x
            inner = activate(experts.up_proj.weight[expert] @ x, gate, activation=cfg.activation)
            total = total + weight * (experts.down_proj.weight[expert] @ inner)
        value = total if moe.fc2_latent_proj is None else moe.fc2_latent_proj.weight @ total
        if moe.shared_experts is not None:
            value = value + moe.shared_experts(token, DOCUMENTS)
        out[tuple(place)] = value
    return out


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"d_latent": 8},
        {"shared_d_ff": 0},
        {"activation": Activation.swiglu, "d_latent": 8},
        {"activation": Activation.gelu, "score": RouterScore.softmax},
        {"top_k": 8},
        {"num_experts": 30, "top_k": 1},  # experts without tokens
    ],
    ids=str,
)
def test_equals_its_definition(changes):
    moe = make_moe(**changes)
    h = torch.randn(2, 12, D_MODEL, dtype=torch.float64, requires_grad=True)
    moe.router.e_score_correction_bias.copy_(torch.linspace(-0.1, 0.1, moe.router.cfg.num_experts))
    out, wanted = moe(h, DOCUMENTS), reference(moe, h)
    torch.testing.assert_close(out, wanted)
    cotangent = torch.randn_like(out)
    leaves = [h, *moe.parameters()]
    found = torch.autograd.grad(out, leaves, cotangent)
    expected = torch.autograd.grad(wanted, leaves, cotangent, allow_unused=True, materialize_grads=True)
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right)


def test_bf16_is_close_to_fp64():
    moe = make_moe(d_latent=8)
    h = torch.randn(2, 12, D_MODEL, dtype=torch.float64)
    wanted = moe(h, DOCUMENTS)
    low = moe.float()(h.bfloat16(), DOCUMENTS)
    assert low.dtype == torch.bfloat16
    assert torch.nn.functional.cosine_similarity(low.double().flatten(), wanted.flatten(), dim=0) > 0.995


def test_fp32_grouped_gemms_are_exact_products():
    moe = make_moe()
    h = torch.randn(2, 12, D_MODEL, dtype=torch.float64)
    wanted = moe(h, DOCUMENTS)
    torch.testing.assert_close(moe.float()(h.float(), DOCUMENTS).double(), wanted, rtol=1e-5, atol=1e-5)


def test_weight_gradients_are_fp32_in_bf16():
    moe = make_moe().float()
    moe(torch.randn(2, 12, D_MODEL).bfloat16(), DOCUMENTS).sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in moe.parameters())


def test_a_penalty_comes_along():
    moe = make_moe(z_loss_weight=0.5)
    h = torch.randn(2, 12, D_MODEL, dtype=torch.float64)
    out = moe(h, DOCUMENTS)
    assert isinstance(out, Penalized)
    assert torch.equal(out.value, make_moe()(h, DOCUMENTS))
    assert out.penalty > 0
    with torch.no_grad():
        assert not isinstance(moe(h, DOCUMENTS), Penalized)


def test_the_same_twice():
    moe = make_moe().float()
    h = torch.randn(2, 12, D_MODEL)
    results = []
    for _ in range(2):
        moe.zero_grad()
        out = moe(h, DOCUMENTS)
        out.square().sum().backward()
        results.append([out, *(parameter.grad.clone() for parameter in moe.parameters())])
    assert all(torch.equal(left, right) for left, right in zip(*results, strict=True))
