import torch

from nvfp4_train.model.part import WHOLE


def test_without_ranks_the_part_is_the_parameter():
    parameter = torch.nn.Parameter(torch.ones(2))
    assert WHOLE.local(parameter) is parameter
    gradient = torch.zeros(2)
    assert WHOLE.gradient(parameter)(gradient) is gradient
