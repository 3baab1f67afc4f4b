from dataclasses import replace

import pytest

from nvfp4_train.config.optimizer import WeightDecayShape
from tests.support.configs import composed, problems_of

VALID = composed().optimizer


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"beta1": 1.0}, "beta1"),
        ({"beta2": -0.1}, "beta2"),
        ({"eps": -1e-8}, "eps"),
        ({"eps": 0.0}, "eps"),
        ({"weight_decay": -0.1, "weight_decay_shape": WeightDecayShape.linear}, "weight_decay"),
        ({"weight_decay_start": 0.2}, "weight_decay_start"),
        ({"clip_grad_norm": -1.0}, "clip_grad_norm"),
    ],
)
def test_a_violated_rule_names_its_key(changes, key):
    assert [problem.key for problem in problems_of(lambda: replace(VALID, **changes))] == [key]


@pytest.mark.parametrize(
    ("changes", "key"),
    [({"momentum": 1.0}, "momentum"), ({"newton_schulz_steps": 0}, "newton_schulz_steps"), ({"beta1": 2.0}, "beta1")],
)
def test_muon_has_rules_of_its_own_beside_those_of_adamw(changes, key):
    muon = composed("optimizer=muon").optimizer
    assert [problem.key for problem in problems_of(lambda: replace(muon, **changes))] == [key]
