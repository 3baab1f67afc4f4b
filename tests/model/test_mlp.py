from dataclasses import replace

import torch
import torch.nn.functional as F

from nvfp4_train.config.moe import Activation
from nvfp4_train.model.documents import locate_documents
from nvfp4_train.model.mlp import build_mlp
from tests.support.models import TINY_MLP, document_ids

DOCUMENTS = locate_documents(document_ids(3))


def test_squared_relu():
    mlp = build_mlp(TINY_MLP, d_model=8).double()
    h = torch.randn(1, 3, 8, dtype=torch.float64, requires_grad=True)
    wanted = h @ mlp.up_proj.weight.T
    wanted = torch.where(wanted > 0, wanted * wanted, 0) @ mlp.down_proj.weight.T
    torch.testing.assert_close(mlp(h, DOCUMENTS), wanted)
    assert torch.autograd.gradcheck(lambda h: mlp(h, DOCUMENTS), h)


def test_swiglu():
    mlp = build_mlp(replace(TINY_MLP, activation=Activation.swiglu), d_model=8).double()
    h = torch.randn(1, 3, 8, dtype=torch.float64)
    gate, up = h @ mlp.gate_proj.weight.T, h @ mlp.up_proj.weight.T
    torch.testing.assert_close(mlp(h, DOCUMENTS), (F.silu(gate) * up) @ mlp.down_proj.weight.T)


def test_gelu_and_biases():
    mlp = build_mlp(replace(TINY_MLP, activation=Activation.gelu, bias=True), d_model=8).double()
    h = torch.randn(1, 3, 8, dtype=torch.float64)
    up = h @ mlp.up_proj.weight.T + mlp.up_proj.bias
    inner = up * 0.5 * (1 + torch.erf(up / 2**0.5))
    torch.testing.assert_close(mlp(h, DOCUMENTS), inner @ mlp.down_proj.weight.T + mlp.down_proj.bias)
