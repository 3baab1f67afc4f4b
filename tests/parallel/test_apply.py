import pytest
import torch

from nvfp4_train.config.run import Device
from nvfp4_train.model.hybrid import build_model
from nvfp4_train.parallel.apply import parallelize
from nvfp4_train.parallel.mesh import build_mesh
from nvfp4_train.parallel.runtime import start_runtime, stop_runtime
from tests.support.tiny import parallel_layout, tiny_model, torch_engine


@pytest.fixture
def mesh():
    yield build_mesh(parallel_layout(), start_runtime(Device.cpu))
    stop_runtime()


@pytest.mark.parametrize("tie_embeddings", [False, True])
@pytest.mark.parametrize("pattern", ["M-*-", "ME|*-/*E/*E"])
def test_names_and_shapes_survive_and_every_parameter_is_distributed(mesh, tie_embeddings, pattern):
    with torch.device("meta"):
        model = build_model(tiny_model(pattern, tie_embeddings=tie_embeddings))
    before = {name: parameter.shape for name, parameter in model.named_parameters()}
    parallelize(
        model, mesh=mesh, parallel_cfg=parallel_layout(), engine_cfg=torch_engine(), compute_dtype=torch.bfloat16
    )
    assert {name: parameter.shape for name, parameter in model.named_parameters()} == before
    for name, parameter in model.named_parameters():
        assert parameter.device_mesh == (mesh.expert_fsdp_mesh if ".experts." in name else mesh.fsdp_mesh), name
        assert parameter.dtype is torch.float32
