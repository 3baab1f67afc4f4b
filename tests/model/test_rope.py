import math

import torch

from nvfp4_train.model.rope import rotate


def test_scores_depend_on_distance_only():
    query, key = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def score(query_position, key_position):
        turned = rotate(query, torch.tensor([[query_position]]), theta=100.0)
        return (turned * rotate(key, torch.tensor([[key_position]]), theta=100.0)).sum()

    torch.testing.assert_close(score(7, 3), score(104, 100), rtol=1e-9, atol=1e-9)
    assert (score(7, 3) - score(7, 4)).abs() > 1e-6


def test_first_position_is_unchanged_and_length_is_kept():
    x = torch.randn(1, 2, 3, 8, dtype=torch.float64)
    turned = rotate(x, torch.tensor([[0, 5]]), theta=10000.0)
    assert torch.equal(turned[:, 0], x[:, 0])
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))


def test_slowest_pair_turns_by_position_over_theta():
    x = torch.zeros(1, 1, 1, 4, dtype=torch.float64)
    x[..., 1] = 1.0  # pair (1, 3), frequency theta ** -(1 / 2)
    turned = rotate(x, torch.tensor([[3]]), theta=100.0)[0, 0, 0]
    expected = [0.0, math.cos(0.3), 0.0, math.sin(0.3)]
    torch.testing.assert_close(turned, torch.tensor(expected, dtype=torch.float64))
