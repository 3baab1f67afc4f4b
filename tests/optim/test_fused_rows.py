import torch

from nvfp4_train.model.attention import Attention
from nvfp4_train.model.mamba2 import Mamba2
from nvfp4_train.optim.fused_rows import FusedRows, fused_rows
from tests.support.models import initialized, tiny_model


def test_parts_are_the_rows_of_all_groups_and_join_undoes_split():
    rows = FusedRows((2, 1))
    matrix = torch.arange(12.0).view(6, 2)
    first, second = rows.split(matrix)
    assert first.tolist() == matrix[[0, 1, 3, 4]].tolist()
    assert second.tolist() == matrix[[2, 5]].tolist()
    assert torch.equal(rows.join([first, second]), matrix)


def test_every_fused_projection_is_found_and_its_parts_cover_it():
    model = initialized(tiny_model(pattern="M*-/*-"))
    parameters, found = dict(model.named_parameters()), fused_rows(model)
    mixers = {name: module for name, module in model.named_modules() if isinstance(module, Mamba2 | Attention)}
    assert len(found) == len(mixers) == 3
    for name, rows in found.items():
        parts = rows.split(parameters[name].detach())
        assert sum(len(part) for part in parts) == len(parameters[name])
        assert len(parts) == (5 if "in_proj" in name else 3)


def test_parts_are_what_the_mixer_takes_apart():
    model = initialized(tiny_model(pattern="M*"))
    mamba, attention = (block.mixer for block in model.blocks)
    found = fused_rows(model)
    z, x, b, c, dt = found["blocks.0.mixer.in_proj.weight"].split(mamba.in_proj.weight.detach())
    assert [len(part) for part in (z, x, b, c, dt)] == [
        mamba.cfg.d_inner,
        mamba.cfg.d_inner,
        mamba.cfg.num_groups * mamba.cfg.d_state,
        mamba.cfg.num_groups * mamba.cfg.d_state,
        mamba.cfg.num_heads,
    ]
    q, k, v = found["blocks.1.mixer.qkv_proj.weight"].split(attention.qkv_proj.weight.detach())
    cfg = attention.cfg
    assert [len(part) for part in (q, k, v)] == [cfg.num_heads * cfg.d_head] + [cfg.num_kv_heads * cfg.d_head] * 2
