import torch
from torch import nn

from nvfp4_train.checkpoint.state import collect_state
from nvfp4_train.model.hybrid import build_model
from nvfp4_train.optim.build import build_optimizer
from tests.support.tiny import tiny_model, tiny_optimizer


def test_names_are_those_of_the_model_and_tensors_are_views():
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = build_optimizer(model, tiny_optimizer())
    state = collect_state(model, optimizer)
    assert list(state["model"]) == ["0.weight", "0.bias"]
    assert {name: sorted(values) for name, values in state["optimizer"].items()} == {
        "0.weight": ["exp_avg", "exp_avg_sq", "step"],
        "0.bias": ["exp_avg", "exp_avg_sq", "step"],
    }
    state["model"]["0.bias"].fill_(3.0)
    state["optimizer"]["0.bias"]["exp_avg"].fill_(4.0)
    assert torch.equal(model[0].bias, torch.full((2,), 3.0))
    assert torch.equal(optimizer.state[model[0].bias]["exp_avg"], torch.full((2,), 4.0))
    assert not any(tensor.requires_grad for tensor in state["model"].values())


def test_corrections_of_routers_are_in_a_checkpoint_and_counts_are_not():
    model = build_model(tiny_model("E"))
    state = collect_state(model, build_optimizer(model, tiny_optimizer()))
    name = "blocks.0.mixer.router.e_score_correction_bias"
    state["model"][name].fill_(0.5)
    assert (model.blocks[0].mixer.router.e_score_correction_bias == 0.5).all()
    assert not any("tokens_per_expert" in key for key in state["model"])
    assert name not in state["optimizer"]
