import pytest
import torch

from nvfp4_train.optim.newton_schulz import orthogonalize


@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16), (3, 32, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_singular_values_become_about_one_and_directions_stay(shape, dtype):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = orthogonalize(matrix, steps=5, dtype=dtype)
    assert found.shape == matrix.shape
    assert found.dtype is torch.float32
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.3
    assert values.max() < 1.3
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    exact = u @ v
    cosine = (found * exact).sum() / (found.norm() * exact.norm())
    assert cosine > 0.95


def test_the_size_of_the_matrix_does_not_matter():
    matrix = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    small, large = (orthogonalize(matrix * scale, steps=5, dtype=torch.float32) for scale in (1e-3, 1e3))
    torch.testing.assert_close(small, large, rtol=1e-3, atol=1e-4)


def test_zeros_stay_zeros_and_nan_is_not_hidden():
    assert not orthogonalize(torch.zeros(8, 4), steps=5, dtype=torch.float32).any()
    matrix = torch.ones(8, 4)
    matrix[0, 0] = torch.nan
    assert orthogonalize(matrix, steps=5, dtype=torch.float32).isnan().any()
