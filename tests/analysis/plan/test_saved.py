"""What autograd saves is counted once, and only what a microbatch has for itself."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nvfp4_train.analysis.plan.local import build_on_meta
from nvfp4_train.analysis.plan.saved import FlashAttention, SavedStorages, kept_bytes, merge_experts
from nvfp4_train.config.parallel import ActivationCheckpoint
from nvfp4_train.precision.experts import QuantizedExperts
from tests.support.configs import composed

NONE, SELECTIVE = ActivationCheckpoint.none, ActivationCheckpoint.selective


def leaf(*shape: int, device: str = "cpu") -> Tensor:
    return torch.zeros(*shape, device=device, requires_grad=True)


def test_a_storage_counts_once():
    x = leaf(8, 4)
    with SavedStorages(NONE) as saved:
        y = x * x + x.exp().sum()  # x twice, and exp(x)
    assert sum(storage.nbytes() for storage in saved.storages.values()) == 2 * 8 * 4 * 4
    assert y.requires_grad


def test_views_count_as_the_storage_that_they_keep():
    wide = leaf(8, 100)
    with SavedStorages(NONE) as saved:
        y = wide[:, :1].square()
    assert [storage.nbytes() for storage in saved.storages.values()] == [8 * 100 * 4]
    assert y.requires_grad


def test_weights_and_what_microbatches_share_do_not_count():
    linear, codes = nn.Linear(4, 6, bias=False), torch.ones(3, 6)

    def run() -> Tensor:
        return (linear(leaf(3, 4).exp()) * codes).sum()

    kept = kept_bytes(run, checkpoint=NONE, shared=list(linear.parameters()))
    assert kept == 3 * 4 * 4  # exp(x), which both exp and the Linear save


def test_the_meta_device_gives_the_bytes_of_a_real_one():
    kept = {}
    for device in ("meta", "cpu"):
        linear = nn.Linear(4, 6, device=device)

        def run(linear: nn.Linear = linear, device: str = device) -> Tensor:
            return F.silu(linear(leaf(3, 4, device=device)))

        kept[device] = kept_bytes(run, checkpoint=NONE, shared=list(linear.parameters()))
    assert kept["meta"] == kept["cpu"] > 0


def test_selective_keeps_results_of_products():
    a, b = leaf(3, 4), leaf(4, 5)
    with SavedStorages(NONE) as without:
        y = (a @ b).exp()
    with SavedStorages(SELECTIVE) as saved:
        z = (a @ b).exp()
    extra = len(saved.storages) - len(without.storages)
    assert extra == 1  # the product itself, of which exp saves its result only
    assert y.shape == z.shape


def test_attention_on_the_meta_device_keeps_no_matrix_of_pairs():
    query, key = leaf(1, 4, 64, 8, device="meta"), leaf(1, 2, 64, 8, device="meta")
    with FlashAttention(), SavedStorages(NONE) as saved:
        out = F.scaled_dot_product_attention(query, key, key.exp(), is_causal=True, enable_gqa=True)
    assert out.shape == query.shape
    assert max(storage.nbytes() for storage in saved.storages.values()) == 4 * 64 * 8 * 4


def test_experts_run_as_one_linear():
    cfg = composed("model=demo", "model.pattern=E", "recipe=nvfp4", "recipe.keep_bf16.last_blocks=0")
    model = build_on_meta(cfg.model, cfg.recipe).model
    merge_experts(model)
    assert not any(isinstance(module, QuantizedExperts) for module in model.modules())
    h = torch.zeros(1, 64, cfg.model.d_model, dtype=torch.bfloat16, device="meta")
    assert model.blocks[0].mixer(h, None).shape == h.shape
