from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from nvfp4_train.config.moe import Activation
from nvfp4_train.config.parallel import ActivationCheckpoint
from nvfp4_train.model.flops import Product, count_flops
from nvfp4_train.model.hybrid import build_model
from nvfp4_train.model.peaks import Precision
from tests.support.models import TINY_ATTENTION, TINY_MAMBA, TINY_MLP, document_ids, initialized, tiny_model

SIZE = 40


def measured(cfg) -> int:
    """What PyTorch counts while a step of one sequence runs."""
    model = initialized(cfg)
    tokens = torch.randint(0, 64, (1, SIZE), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter:
        model(tokens, document_ids=document_ids(SIZE), labels=tokens).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "cfg",
    [
        tiny_model(pattern="--"),
        tiny_model(pattern="-", mlp=replace(TINY_MLP, activation=Activation.swiglu)),
        tiny_model(pattern="-", tie_embeddings=True),
        tiny_model(pattern="-/-/-"),
        tiny_model(pattern="-/-/-", mtp=replace(tiny_model().mtp, share_depths=True)),
    ],
    ids=["MLP", "SwiGLU", "tied", "two depths", "a shared depth"],
)
def test_linears_are_what_pytorch_counts(cfg):
    report = count_flops(build_model(cfg), document_lengths=[SIZE])
    assert report.model == measured(cfg)
    assert report.hardware(ActivationCheckpoint.none) == report.model
    assert report.model_per_token == report.model / SIZE


def row(cfg, product, *lengths):
    rows = [row for row in count_flops(build_model(cfg), document_lengths=lengths).rows if row.product is product]
    assert len(rows) == 1
    return rows[0]


def test_scans_are_what_pytorch_counts():
    cfg = tiny_model(pattern="M", mamba=replace(TINY_MAMBA, chunk_size=10))
    report = count_flops(build_model(cfg), document_lengths=[SIZE])
    # Besides, our scan sums log-decays by a product with a mask, forward and backward.
    sums = 2 * 2 * 10 * cfg.mamba.num_heads * SIZE
    assert report.hardware(ActivationCheckpoint.none) == measured(cfg) - sums


def test_the_recurrence_does_not_depend_on_the_chunk():
    small, large = (tiny_model(pattern="M", mamba=replace(TINY_MAMBA, chunk_size=size)) for size in (4, 40))
    assert row(small, Product.scan, SIZE).forward == row(large, Product.scan, SIZE).forward
    assert row(small, Product.scan, SIZE).executed_forward < row(large, Product.scan, SIZE).executed_forward
    assert row(small, Product.scan, 41).executed_forward == row(small, Product.scan, 44).executed_forward


@pytest.mark.parametrize(("lengths", "window"), [((7,), 0), ((3, 4), 0), ((9, 2), 3), ((2,), 5)])
def test_attention_counts_the_pairs_of_its_mask(lengths, window):
    cfg = tiny_model(pattern="*", attention=replace(TINY_ATTENTION, window_tokens=window))
    pairs = sum(
        1 for size in lengths for query in range(size) for key in range(query + 1) if not window or query - key < window
    )
    found = row(cfg, Product.attention, *lengths)
    assert found.forward == 2 * 2 * 4 * 16 * pairs
    assert found.executed_backward == 2.5 * found.forward


def test_a_token_pays_for_the_experts_that_it_uses():
    cfg = tiny_model(pattern="E", moe=replace(tiny_model().moe, d_latent=16))
    report = count_flops(build_model(cfg), document_lengths=[SIZE])
    forward = {row.module: row.forward / SIZE for row in report.rows}
    assert forward["blocks.0.mixer.experts.up_proj"] == 2 * 2 * 16 * 32
    assert forward["blocks.0.mixer.shared_experts.up_proj"] == 2 * 32 * 48
    assert forward["blocks.0.mixer.fc1_latent_proj"] == 2 * 32 * 16
    assert forward["blocks.0.mixer.router"] == 2 * 32 * 8
    assert report.by_product()[Product.router] == 3 * 2 * 32 * 8 * SIZE
    assert sum(report.by_product().values()) == report.model


def test_recomputing_blocks_costs_their_forward():
    report = count_flops(build_model(tiny_model(pattern="-")), document_lengths=[SIZE])
    once = report.hardware(ActivationCheckpoint.none)
    assert report.hardware(ActivationCheckpoint.block) == once + 2 * 2 * 32 * 64 * SIZE
    assert report.hardware(ActivationCheckpoint.selective) == once


def test_flops_by_precision_add_up():
    report = count_flops(build_model(tiny_model(pattern="-*E")), document_lengths=[SIZE])
    gemms = {
        "blocks.0.mixer.up_proj": {"fprop": Precision.fp4, "dgrad": Precision.fp8, "wgrad": Precision.fp4},
        "lm_head": dict.fromkeys(("fprop", "dgrad", "wgrad"), Precision.bf16),
    }
    found = report.by_precision(gemms, otherwise=Precision.bf16)
    assert found[Precision.fp4] == 2 * 2 * 32 * 64 * SIZE
    assert found[Precision.fp8] == 2 * 32 * 64 * SIZE
    assert found[Precision.fp32] == report.by_product()[Product.router]
    assert sum(found.values()) == report.model


def test_the_paper_12b_costs_six_flops_per_parameter_and_token():
    """Besides attention, scan and the embedding, which is looked up."""
    from nvfp4_train.config.load import load_config

    with torch.device("meta"):
        model = build_model(load_config(["model=paper_12b"]).cfg.model)
    report = count_flops(model, document_lengths=[8192])
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "conv1d" not in name)
    assert report.by_product()[Product.linear] == 6.0 * (matrices - model.embedding.weight.numel()) * 8192
