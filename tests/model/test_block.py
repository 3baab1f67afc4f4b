import pytest
import torch

from nvfp4_train.config.pattern import LayerKind
from nvfp4_train.model.attention import Attention
from nvfp4_train.model.block import Block, build_mixer
from nvfp4_train.model.documents import locate_documents
from nvfp4_train.model.mamba2 import Mamba2
from nvfp4_train.model.mlp import SquaredReluMlp
from tests.support.models import TINY_MODEL, document_ids


@pytest.mark.parametrize(
    ("kind", "mixer"), [(LayerKind.mamba, Mamba2), (LayerKind.attention, Attention), (LayerKind.mlp, SquaredReluMlp)]
)
def test_letters(kind, mixer):
    assert isinstance(build_mixer(TINY_MODEL, kind=kind), mixer)


def test_residual():
    block = Block(TINY_MODEL, kind=LayerKind.mlp)
    torch.nn.init.ones_(block.norm.weight)
    h, documents = torch.randn(1, 3, 32), locate_documents(document_ids(3))
    normed = h / (h.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(block(h, documents), h + block.mixer(normed, documents))
