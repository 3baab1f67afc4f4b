from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from nvfp4_train.config.model import MambaConfig, NormGroup
from nvfp4_train.model.documents import locate_documents
from nvfp4_train.model.mamba2 import Mamba2
from tests.support.models import TINY_MAMBA, document_ids

D_MODEL = 8


def make_mixer(cfg: MambaConfig = TINY_MAMBA, *, dtype=torch.float64) -> Mamba2:
    mixer = Mamba2(cfg, d_model=D_MODEL, norm_eps=1e-5).to(dtype)
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=rng) * 0.5)
    return mixer


def reference(mixer: Mamba2, h: torch.Tensor) -> torch.Tensor:
    """One document, group by group, head by head, token by token."""
    cfg, size = mixer.cfg, h.shape[0]
    share = cfg.num_heads // cfg.num_groups
    inner = share * cfg.d_head
    rows = mixer.in_proj.weight.view(cfg.num_groups, -1, D_MODEL)
    taps = mixer.conv1d.weight.view(cfg.num_groups, -1, cfg.d_conv)
    biases = mixer.conv1d.bias.view(cfg.num_groups, -1)
    y, gates = [], []
    for group in range(cfg.num_groups):
        z, xbc, dt = (h @ rows[group].T).split((inner, inner + 2 * cfg.d_state, share), dim=1)
        padded = F.pad(xbc, (0, 0, cfg.d_conv - 1, 0))
        mixed = torch.stack([(padded[t : t + cfg.d_conv] * taps[group].T).sum(0) for t in range(size)])
        x, b, c = F.silu(mixed + biases[group]).split((inner, cfg.d_state, cfg.d_state), dim=1)
        for local in range(share):
            head = group * share + local
            step = F.softplus(dt[:, local] + mixer.scan.dt_bias[head]).clamp(cfg.dt_min, cfg.dt_max)
            rate = -mixer.scan.A_log[head].exp()
            state = h.new_zeros(cfg.d_head, cfg.d_state)
            out = []
            for t in range(size):
                x_t = x[t, local * cfg.d_head : (local + 1) * cfg.d_head]
                state = (step[t] * rate).exp() * state + step[t] * torch.outer(x_t, b[t])
                out.append(state @ c[t] + mixer.scan.D[head] * x_t)
            y.append(torch.stack(out))
        gates.append(z)
    gated = torch.cat(y, dim=1) * F.silu(torch.cat(gates, dim=1))
    width = inner if cfg.norm_group is NormGroup.group else cfg.d_inner
    by_group = gated.unflatten(1, (-1, width))
    normed = by_group / (by_group.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return (normed.flatten(1) * mixer.norm.weight) @ mixer.out_proj.weight.T


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_groups": 1},
        {"num_groups": 4},
        {"norm_group": NormGroup.whole},
        {"dt_min": 0.5, "dt_max": 1.0},
        {"d_conv": 2, "chunk_size": 5},
    ],
    ids=str,
)
@pytest.mark.parametrize("lengths", [(13,), (3, 9, 1)])
def test_equals_its_definition(changes, lengths):
    mixer = make_mixer(replace(TINY_MAMBA, **changes))
    h = torch.randn(1, 13, D_MODEL, dtype=torch.float64)
    wanted = torch.cat([reference(mixer, part) for part in h[0].split(lengths)])
    torch.testing.assert_close(mixer(h, locate_documents(document_ids(*lengths)))[0], wanted, rtol=1e-9, atol=1e-9)


def test_dt_limits_matter():
    h, documents = torch.randn(1, 13, D_MODEL, dtype=torch.float64), locate_documents(document_ids(13))
    limited = make_mixer(replace(TINY_MAMBA, dt_min=0.5, dt_max=1.0))
    assert not torch.allclose(make_mixer()(h, documents), limited(h, documents))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_document_changes_no_bit(dtype):
    mixer, documents = make_mixer(dtype=torch.float32), locate_documents(document_ids(4, 30, 6))
    h = torch.randn(1, 40, D_MODEL).to(dtype)
    changed = h.clone()
    changed[:, 4:34] = torch.randn(1, 30, D_MODEL).to(dtype) * 3
    before, after = mixer(h, documents), mixer(changed, documents)
    others = documents.ids[0] != 1
    assert torch.equal(before[:, others], after[:, others])
    assert not torch.equal(before[:, ~others], after[:, ~others])


def test_a_row_shard_of_whole_groups_is_a_model_of_its_groups():
    mixer = make_mixer()
    half = make_mixer(replace(TINY_MAMBA, num_heads=2, num_groups=1))
    with torch.no_grad():
        for name, parameter in half.named_parameters():
            whole = mixer.get_parameter(name)
            parameter.copy_(whole[:, :32] if name == "out_proj.weight" else whole[: len(parameter)])
        mixer.out_proj.weight[:, 32:] = 0
    h, documents = torch.randn(1, 13, D_MODEL, dtype=torch.float64), locate_documents(document_ids(13))
    torch.testing.assert_close(mixer(h, documents), half(h, documents))
