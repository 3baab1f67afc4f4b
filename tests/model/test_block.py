from dataclasses import replace

import pytest
import torch

from nvfp4_train.config.pattern import LayerKind
from nvfp4_train.model.attention import Attention
from nvfp4_train.model.block import Block, build_mixer, run_blocks
from nvfp4_train.model.documents import locate_documents
from nvfp4_train.model.mamba2 import Mamba2
from nvfp4_train.model.mlp import Mlp
from nvfp4_train.model.moe import Moe, Penalized
from tests.support.models import TINY_MODEL, document_ids


@pytest.mark.parametrize(
    ("kind", "mixer"),
    [(LayerKind.mamba, Mamba2), (LayerKind.attention, Attention), (LayerKind.mlp, Mlp), (LayerKind.moe, Moe)],
)
def test_letters(kind, mixer):
    assert isinstance(build_mixer(TINY_MODEL, kind=kind), mixer)


def test_residual():
    block = Block(TINY_MODEL, kind=LayerKind.mlp)
    torch.nn.init.ones_(block.norm.weight)
    h, documents = torch.randn(1, 3, 32), locate_documents(document_ids(3))
    normed = h / (h.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(block(h, documents), h + block.mixer(normed, documents))


def test_a_stream_in_fp32_meets_a_mixer_in_bf16():
    block = Block(TINY_MODEL, kind=LayerKind.mlp)
    torch.nn.init.ones_(block.norm.weight)
    block.compute_dtype = torch.bfloat16
    seen = []
    block.mixer.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    h = torch.randn(1, 3, 32)
    out = block(h, locate_documents(document_ids(3)))
    assert out.dtype == torch.float32
    assert seen == [torch.bfloat16]


def test_a_penalty_passes_through():
    cfg = replace(TINY_MODEL, moe=replace(TINY_MODEL.moe, z_loss_weight=0.1))
    block = Block(cfg, kind=LayerKind.moe)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter)
    h, documents = torch.randn(1, 3, 32), locate_documents(document_ids(3))
    out = block(h, documents)
    assert isinstance(out, Penalized)
    penalties = []
    stream = run_blocks(torch.nn.ModuleList([block, block]), h, documents, penalties=penalties)
    assert len(penalties) == 2
    assert torch.equal(penalties[0], out.penalty)
    assert torch.equal(stream, block(out.value, documents).value)
