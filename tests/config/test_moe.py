from dataclasses import replace

import pytest

from tests.support.configs import problems_of
from tests.support.models import TINY_MOE


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"num_experts": 0}, ["num_experts", "top_k"]),
        ({"top_k": 9}, ["top_k"]),
        ({"num_groups": 3}, ["num_experts"]),
        ({"num_groups": 4, "top_groups": 5}, ["top_groups"]),
        ({"num_groups": 4, "top_groups": 1, "top_k": 3}, ["top_k"]),
        ({"d_latent": -1, "shared_d_ff": -1}, ["shared_d_ff", "d_latent"]),
        ({"bias_update_rate": -1.0, "z_loss_weight": -1.0}, ["bias_update_rate", "z_loss_weight"]),
        ({"auxiliary_loss_weight": float("nan")}, ["auxiliary_loss_weight"]),
        ({"routed_scaling": 0.0}, ["routed_scaling"]),
    ],
)
def test_a_violated_rule_names_its_key(changes, keys):
    assert [problem.key for problem in problems_of(lambda: replace(TINY_MOE, **changes))] == keys


def test_as_many_experts_as_the_groups_hold():
    assert replace(TINY_MOE, num_groups=4, top_groups=2, top_k=4).top_k == 4
