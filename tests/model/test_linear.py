import pytest
import torch

from nvfp4_train.model.linear import GroupedLinear, Linear


def test_master_weight_is_cast_to_the_activation():
    linear = Linear(4, 3)
    x = torch.randn(2, 4).to(torch.bfloat16)
    y = linear(x)
    assert torch.equal(y, x @ linear.weight.to(torch.bfloat16).T)
    y.float().sum().backward()
    assert linear.weight.dtype == linear.weight.grad.dtype == torch.float32
    assert linear.bias is None


def test_bias():
    linear = Linear(4, 3, bias=True)
    x = torch.randn(2, 4).to(torch.bfloat16)
    assert torch.equal(linear(x), torch.nn.functional.linear(x, linear.weight.bfloat16(), linear.bias.bfloat16()))


@pytest.mark.parametrize("widths", [(16, 8), (14, 9), (16, 3), (5, 8), (1, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_each_token_goes_through_its_own_matrix(dtype, widths):
    """Of any width, though grouped GEMMs want rows that start at multiples of 16 bytes."""
    in_features, out_features = widths
    grouped = GroupedLinear(4, in_features, out_features, uses_per_token=2)
    torch.nn.init.normal_(grouped.weight)
    counts = (3, 0, 6, 1)
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    if dtype is torch.float64:
        grouped = grouped.double()
    x, dy = torch.randn(10, in_features).to(dtype).requires_grad_(), torch.randn(out_features, 10).to(dtype).T
    y = grouped(x, ends)
    assert y.dtype == dtype
    y.backward(dy)  # not contiguous
    exact = x.detach().double().requires_grad_()
    weight = grouped.weight.detach().to(dtype).double().requires_grad_()
    wanted = torch.cat([part @ matrix.T for part, matrix in zip(exact.split(counts), weight, strict=True)])
    wanted.backward(dy.double())
    close = {torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(y.double(), wanted, rtol=close, atol=close)
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=close, atol=close)
    # Products of BF16 are exact in FP32: weight gradients are not rounded to BF16.
    close = min(close, 1e-5)
    torch.testing.assert_close(grouped.weight.grad.double(), weight.grad, rtol=close, atol=close)
    assert grouped.weight.grad.dtype == grouped.weight.dtype


def test_gradients_of_bf16_experts_are_fp32():
    grouped = GroupedLinear(2, 16, 8, uses_per_token=1).bfloat16()
    grouped(torch.randn(4, 16).bfloat16(), torch.tensor([1, 4], dtype=torch.int32)).sum().backward()
    assert grouped.weight.grad.dtype == torch.float32
