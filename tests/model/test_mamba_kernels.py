"""The kernels are not on this machine: stand-ins check how they are called, and compute what they are documented to."""

import logging
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nvfp4_train.config.model import MambaKernels
from nvfp4_train.model import conv, mamba2
from nvfp4_train.model.documents import Documents, locate_documents
from nvfp4_train.model.mamba2 import Mamba2
from nvfp4_train.model.mamba_kernels import OWN, choose_kernels, conv_kernel, scan_kernel
from tests.support.models import TINY_MAMBA, document_ids

D_MODEL = 8
LENGTHS = (3, 9, 1)
CFG = replace(TINY_MAMBA, num_heads=6, num_groups=2, d_head=8, d_state=12, dt_min=0.05, dt_max=0.9)


def stand_in_scan(x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, seq_idx=None, **options) -> Tensor:
    """``mamba_chunk_scan_combined`` token by token."""
    rows, size, heads, width = x.shape
    groups, d_state = B.shape[2:]
    assert (heads, width, groups, d_state) == (6, 8, 2, 12)
    assert dt.shape == (rows, size, heads)
    assert A.shape == D.shape == dt_bias.shape == (heads,)
    assert B.shape == C.shape == (rows, size, groups, d_state)
    assert (A < 0).all()
    assert (chunk_size, z, options) == (8, None, {"dt_softplus": True, "dt_limit": (0.05, 0.9)})
    assert seq_idx is None or (seq_idx.dtype, seq_idx.shape) == (torch.int32, (rows, size))
    step = F.softplus(dt + dt_bias).clamp(*options["dt_limit"])
    state = x.new_zeros(rows, heads, width, d_state)
    out = []
    for t in range(size):
        if seq_idx is not None and t:
            state = state * (seq_idx[:, t] == seq_idx[:, t - 1])[:, None, None, None]
        b, c = (value[:, t].repeat_interleave(heads // groups, dim=1) for value in (B, C))
        decay = (step[:, t] * A).exp()[..., None, None]
        state = decay * state + step[:, t, :, None, None] * x[:, t, :, :, None] * b[:, :, None]
        out.append((state * c[:, :, None]).sum(-1) + D[:, None] * x[:, t])
    return torch.stack(out, dim=1)


def stand_in_conv(x, weight, bias=None, seq_idx=None, activation=None) -> Tensor:
    """``causal_conv1d_fn`` tap by tap."""
    rows, channels, size = x.shape
    assert x.stride(1) == 1  # document ids need the channels innermost
    assert x.stride(0) % 8 == x.stride(2) % 8 == 0
    assert weight.shape == (channels, 4)
    assert bias.shape == (channels,)
    assert activation == "silu"
    if seq_idx is not None:
        assert (seq_idx.dtype, seq_idx.shape, seq_idx.is_contiguous()) == (torch.int32, (rows, size), True)
    total = bias[:, None] + torch.zeros_like(x)
    for age in range(4):
        shifted = F.pad(x, (age, 0))[..., :size]
        if seq_idx is not None and age:
            same = F.pad(seq_idx, (age, 0), value=-1)[..., :size] == seq_idx
            shifted = shifted * same[:, None]
        total = total + weight[:, 3 - age, None] * shifted
    return F.silu(total)


@pytest.fixture
def both(monkeypatch) -> None:
    """Both libraries import, and what they give is used for every tensor."""
    ssm = ModuleType("mamba_ssm.ops.triton.ssd_combined")
    ssm.mamba_chunk_scan_combined = stand_in_scan
    causal = ModuleType("causal_conv1d")
    causal.causal_conv1d_fn = stand_in_conv
    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, ssm.__name__, ssm)
    monkeypatch.setitem(sys.modules, causal.__name__, causal)


@pytest.fixture(autouse=True)
def fresh():
    """A process that has not chosen yet."""
    choose_kernels.cache_clear()
    yield
    choose_kernels.cache_clear()


def make_mixer(**changes) -> Mamba2:
    mixer = Mamba2(replace(CFG, **changes), d_model=D_MODEL, norm_eps=1e-5).double()
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=rng) * 0.5)
    return mixer


def run(mixer: Mamba2, documents: Documents) -> list[Tensor]:
    """The output, and the gradients of input and parameters."""
    h = torch.randn(2, 13, D_MODEL, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    out = mixer(h, documents)
    return [out, *torch.autograd.grad(out.square().sum(), [h, *mixer.parameters()])]


@pytest.mark.parametrize("lengths", [LENGTHS, (13,)])
def test_the_libraries_are_called_as_documented_and_give_what_ours_give(both, monkeypatch, lengths):
    documents = locate_documents(document_ids(*lengths, rows=2))
    ours = run(make_mixer(), documents)
    chosen = choose_kernels(MambaKernels.auto, "cuda")
    calls = []

    def used(name, kernel):
        return lambda *args, **kwargs: calls.append(name) or kernel(*args, **kwargs)

    monkeypatch.setattr(mamba2, "scan_kernel", lambda cfg, x: used("scan", chosen.scan))
    monkeypatch.setattr(conv, "conv_kernel", lambda choice, x, *, d_conv: used("conv", chosen.conv))
    theirs = run(make_mixer(), documents)
    assert calls == ["conv", "scan"]
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-9)


def test_parts_of_a_sequence_stay_with_ours(both, monkeypatch):
    """The libraries are not given the state before a row; ours is."""
    monkeypatch.setattr(mamba2, "scan_kernel", lambda cfg, x: stand_in_scan)
    scan = make_mixer().scan
    x, b = torch.randn(1, 5, 2, 3, 8, dtype=torch.float64), torch.randn(1, 5, 2, 12, dtype=torch.float64)
    dt, documents = torch.randn(1, 5, 2, 3, dtype=torch.float64), locate_documents(document_ids(5))
    state = torch.randn(1, 2, 3, 12, 8, dtype=torch.float64)
    found = scan(x, b=b, c=b, dt=dt, documents=documents, initial_state=state)
    assert not torch.allclose(found, scan(x, b=b, c=b, dt=dt, documents=documents))


def test_both_are_chosen_on_cuda_once_and_logged_once(both, caplog):
    caplog.set_level(logging.INFO, logger="nvfp4_train")
    first = choose_kernels(MambaKernels.auto, "cuda")
    assert (first.scan, first.conv) == (stand_in_scan, stand_in_conv)
    assert choose_kernels(MambaKernels.auto, "cuda") is first
    (message,) = [record.getMessage() for record in caplog.records]
    assert message == (
        "Mamba-2: the scan is that of mamba_ssm, in BF16, the convolution that of causal_conv1d (both import)"
    )


@pytest.mark.parametrize("choice", [MambaKernels.auto, MambaKernels.pytorch])
def test_ours_are_used_where_there_are_no_others(choice, both, caplog):
    caplog.set_level(logging.INFO, logger="nvfp4_train")
    assert choose_kernels(choice, "cpu") == OWN
    assert choose_kernels(MambaKernels.pytorch, "cuda") == OWN
    assert all("the scan is that of this package" in record.getMessage() for record in caplog.records)


def test_one_of_the_libraries_is_enough_for_its_part(both, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="nvfp4_train")
    monkeypatch.setitem(sys.modules, "causal_conv1d", None)
    found = choose_kernels(MambaKernels.auto, "cuda")
    assert (found.scan, found.conv) == (stand_in_scan, None)
    assert "causal_conv1d does not import (" in caplog.text
    with pytest.raises(ValueError, match=r"mamba_ssm, but causal_conv1d does not import .*nvfp4-train\[mamba\]"):
        choose_kernels(MambaKernels.mamba_ssm, "cuda")


def test_asking_for_them_without_cuda_is_an_error(both):
    with pytest.raises(ValueError, match="mamba_ssm computes on cuda, this run on cpu"):
        choose_kernels(MambaKernels.mamba_ssm, "cpu")
    with pytest.raises(ValueError, match="mamba_ssm computes on cuda"):
        make_mixer(kernels=MambaKernels.mamba_ssm)(
            torch.zeros(1, 2, D_MODEL, dtype=torch.float64).float(), locate_documents(document_ids(2))
        )


def fake_tensor(dtype: torch.dtype, *, channels: int = 16) -> Tensor:
    class OnCuda:
        device = torch.device("cuda")
        shape = (1, 2, channels)

    OnCuda.dtype = dtype
    return OnCuda()  # type: ignore[return-value]


def test_they_are_used_for_what_they_have_kernels_for(both):
    assert scan_kernel(CFG, fake_tensor(torch.bfloat16)) is stand_in_scan
    assert scan_kernel(CFG, fake_tensor(torch.float32)) is None
    assert scan_kernel(replace(CFG, kernels=MambaKernels.pytorch), fake_tensor(torch.bfloat16)) is None
    for dtype in (torch.bfloat16, torch.float32):
        assert conv_kernel(MambaKernels.auto, fake_tensor(dtype), d_conv=4) is stand_in_conv
    assert conv_kernel(MambaKernels.auto, fake_tensor(torch.float64), d_conv=4) is None
    assert conv_kernel(MambaKernels.auto, fake_tensor(torch.bfloat16), d_conv=5) is None
    assert conv_kernel(MambaKernels.auto, fake_tensor(torch.bfloat16, channels=12), d_conv=4) is None


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(200, 300, 12), (512,)])
def test_the_real_ones_give_what_ours_give(lengths):
    pytest.importorskip("mamba_ssm")
    pytest.importorskip("causal_conv1d")
    cfg = replace(CFG, num_heads=8, d_head=64, d_state=128, chunk_size=128)
    ids = document_ids(*lengths, rows=2).cuda()
    h = torch.randn(2, 512, 64, generator=torch.Generator().manual_seed(1)).to("cuda", torch.bfloat16)
    results = []
    for kernels in (MambaKernels.pytorch, MambaKernels.mamba_ssm):
        mixer = Mamba2(replace(cfg, kernels=kernels), d_model=64, norm_eps=1e-5)
        rng = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in mixer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=rng) * 0.3)
        mixer = mixer.cuda()
        leaf = h.clone().requires_grad_()
        out = mixer(leaf, locate_documents(ids))
        out.float().square().sum().backward()
        results.append([out, leaf.grad, *(parameter.grad for parameter in mixer.parameters())])
    for left, right in zip(*results, strict=True):
        assert F.cosine_similarity(left.float().flatten(), right.float().flatten(), dim=0) > 0.999
