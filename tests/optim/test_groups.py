import pytest
import torch
from torch import nn

from nvfp4_train.model.hybrid import build_model
from nvfp4_train.optim.groups import split_by_decay, split_by_shape
from tests.support.tiny import tiny_model


def test_every_parameter_of_a_hybrid_is_in_the_group_of_its_kind():
    with torch.device("meta"):
        model = build_model(tiny_model("M*-"))
    groups = split_by_decay(model)
    assert list(groups.decayed) == [
        "embedding.weight",
        "blocks.0.mixer.in_proj.weight",
        "blocks.0.mixer.conv1d.weight",
        "blocks.0.mixer.out_proj.weight",
        "blocks.1.mixer.qkv_proj.weight",
        "blocks.1.mixer.o_proj.weight",
        "blocks.2.mixer.up_proj.weight",
        "blocks.2.mixer.down_proj.weight",
        "lm_head.weight",
    ]
    assert list(groups.not_decayed) == [
        "blocks.0.norm.weight",
        "blocks.0.mixer.conv1d.bias",
        "blocks.0.mixer.scan.A_log",
        "blocks.0.mixer.scan.D",
        "blocks.0.mixer.scan.dt_bias",
        "blocks.0.mixer.norm.weight",
        "blocks.1.norm.weight",
        "blocks.2.norm.weight",
        "final_norm.weight",
    ]


@pytest.mark.parametrize("bias", [True, False])
def test_linear_biases_do_not_decay(bias):
    groups = split_by_decay(nn.Linear(4, 3, bias=bias))
    assert list(groups.decayed) == ["weight"]
    assert list(groups.not_decayed) == (["bias"] if bias else [])


def test_a_shared_parameter_is_in_once():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    assert list(split_by_decay(model).decayed) == ["0.weight"]


def test_matrices_are_what_lies_between_two_spaces_of_features():
    with torch.device("meta"):
        model = build_model(tiny_model("M*-E"))
    groups = split_by_shape(model)
    mixers = ("0.mixer.in_proj", "0.mixer.out_proj", "1.mixer.qkv_proj", "1.mixer.o_proj", "2.mixer.up_proj")
    experts = ("experts.up_proj", "experts.down_proj", "router", "shared_experts.up_proj", "shared_experts.down_proj")
    expected = {f"blocks.{name}.weight" for name in (*mixers, "2.mixer.down_proj")}
    assert groups.matrices.keys() == expected | {f"blocks.3.mixer.{name}.weight" for name in experts}
    assert groups.others.keys() == dict(model.named_parameters()).keys() - groups.matrices.keys()
