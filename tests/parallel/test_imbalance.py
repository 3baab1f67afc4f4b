"""What one rank knows by itself; what the stages of a pipeline tell each other is in test_pipeline.py."""

from dataclasses import dataclass

import pytest
import torch

from nvfp4_train.model.hybrid import HybridLM
from nvfp4_train.model.router import Router
from nvfp4_train.parallel.imbalance import expert_imbalance
from tests.support.tiny import tiny_model


@dataclass
class OneStage:
    device: torch.device

    def degree(self, axis: str) -> int:
        return {"pp": 1}[axis]


def test_a_rank_with_the_whole_model_reports_its_routers():
    model = HybridLM(tiny_model("ME-E"))
    routers = {name: module for name, module in model.named_modules() if isinstance(module, Router)}
    mesh = OneStage(torch.device("cpu"))
    assert expert_imbalance(model, mesh=mesh) == {}  # before the first step
    for number, router in enumerate(routers.values()):
        router.load = torch.tensor([1 + number, *[1] * 7])
    found = {name: value.item() for name, value in expert_imbalance(model, mesh=mesh).items()}
    assert found == pytest.approx({"blocks.1.mixer.router": 0.0, "blocks.3.mixer.router": 2 * 8 / 9 - 1})
