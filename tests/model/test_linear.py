import torch

from nvfp4_train.model.linear import Linear


def test_master_weight_is_cast_to_the_activation():
    linear = Linear(4, 3)
    x = torch.randn(2, 4).to(torch.bfloat16)
    y = linear(x)
    assert torch.equal(y, x @ linear.weight.to(torch.bfloat16).T)
    y.float().sum().backward()
    assert linear.weight.dtype == linear.weight.grad.dtype == torch.float32
    assert linear.bias is None
