import math
from dataclasses import replace

import pytest
import torch

from nvfp4_train.config.model import Position
from nvfp4_train.model.attention import Attention
from nvfp4_train.model.documents import Documents, locate_documents
from nvfp4_train.model.rope import rotate
from tests.support.models import TINY_ATTENTION, document_ids

D_MODEL = 8


def make_attention(*, position=Position.none, dtype=torch.float64) -> Attention:
    torch.manual_seed(0)
    return Attention(replace(TINY_ATTENTION, position=position), d_model=D_MODEL, norm_eps=1e-5).to(dtype)


def reference(attention: Attention, h: torch.Tensor, documents: Documents) -> torch.Tensor:
    """One head, one query at a time."""
    heads, kv_heads, width = 4, 2, 16
    share = heads // kv_heads
    blocks = attention.qkv_proj.weight.view(kv_heads, share + 2, width, D_MODEL)
    query_rows, key_rows, value_rows = blocks[:, :share].flatten(0, 1), blocks[:, -2], blocks[:, -1]
    query = torch.einsum("bsd,hpd->bshp", h, query_rows)
    key = torch.einsum("bsd,hpd->bshp", h, key_rows)
    value = torch.einsum("bsd,hpd->bshp", h, value_rows)
    if attention.cfg.position is Position.rope:
        query, key = (rotate(t, documents.positions, theta=10000.0) for t in (query, key))
    out = torch.zeros_like(query)
    for row in range(h.shape[0]):
        for t in range(h.shape[1]):
            seen = (documents.ids[row, : t + 1] == documents.ids[row, t]).nonzero()[:, 0]
            for head in range(heads):
                scores = key[row, seen, head // share] @ query[row, t, head] / math.sqrt(width)
                out[row, t, head] = scores.softmax(0) @ value[row, seen, head // share]
    return out.flatten(2) @ attention.o_proj.weight.T


@pytest.mark.parametrize("position", list(Position))
@pytest.mark.parametrize("lengths", [(7,), (3, 4), (1, 5, 1)])
def test_equals_its_definition(lengths, position):
    attention = make_attention(position=position)
    documents = locate_documents(document_ids(*lengths, rows=2))
    h = torch.randn(2, 7, D_MODEL, dtype=torch.float64)
    torch.testing.assert_close(attention(h, documents), reference(attention, h, documents))


def test_mask_of_one_document_equals_no_mask():
    attention, documents = make_attention(), locate_documents(document_ids(7))
    h = torch.randn(1, 7, D_MODEL, dtype=torch.float64)
    torch.testing.assert_close(attention(h, documents), attention(h, replace(documents, one_per_row=False)))


def test_rope_positions_restart_in_each_document():
    attention = make_attention(position=Position.rope)
    h = torch.randn(1, 5, D_MODEL, dtype=torch.float64)
    packed = attention(torch.cat((torch.randn_like(h), h), dim=1), locate_documents(document_ids(5, 5)))
    torch.testing.assert_close(packed[:, 5:], attention(h, locate_documents(document_ids(5))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_document_changes_no_bit(dtype):
    attention, documents = make_attention(dtype=torch.float32), locate_documents(document_ids(4, 30, 6))
    h = torch.randn(1, 40, D_MODEL).to(dtype)
    changed = h.clone()
    changed[:, 4:34] = torch.randn(1, 30, D_MODEL).to(dtype) * 3
    before, after = attention(h, documents), attention(changed, documents)
    others = documents.ids[0] != 1
    assert torch.equal(before[:, others], after[:, others])
    assert not torch.equal(before[:, ~others], after[:, ~others])


def test_options_equal_their_definition():
    cfg = replace(TINY_ATTENTION, qk_norm=True, window_tokens=3, qkv_bias=True, output_bias=True)
    attention = Attention(cfg, d_model=D_MODEL, norm_eps=1e-5).double()
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter)
    documents = locate_documents(document_ids(5, 4))
    h = torch.randn(1, 9, D_MODEL, dtype=torch.float64)
    rows = attention.qkv_proj(h)[0].view(9, 2, 4, 16)  # token, key-value head, (2 queries, key, value), channel
    normed = rows / (rows.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    out = torch.zeros(9, 4, 16, dtype=torch.float64)
    for t in range(9):
        seen = [s for s in range(max(0, t - 2), t + 1) if documents.ids[0, s] == documents.ids[0, t]]
        for head in range(4):
            query = normed[t, head // 2, head % 2] * attention.q_norm.weight
            keys = normed[seen, head // 2, 2] * attention.k_norm.weight
            out[t, head] = (keys @ query / 4).softmax(0) @ rows[seen, head // 2, 3]
    wanted = out.flatten(1) @ attention.o_proj.weight.T + attention.o_proj.bias
    torch.testing.assert_close(attention(h, documents)[0], wanted)
