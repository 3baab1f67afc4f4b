import torch

from nvfp4_train.optim.sharding import Sharding


def test_without_ranks_everything_is_whole():
    sharding = Sharding()
    tensor = torch.arange(6.0).view(2, 3)
    assert sharding.local(tensor) is tensor
    zeros = sharding.zeros_like(tensor, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert (zeros.shape, zeros.dtype, zeros.any().item()) == (tensor.shape, torch.bfloat16, False)
    doubled, negated = sharding.map_whole([tensor, tensor], [lambda whole: 2 * whole, torch.neg])
    assert torch.equal(doubled, 2 * tensor)
    assert torch.equal(negated, -tensor)
