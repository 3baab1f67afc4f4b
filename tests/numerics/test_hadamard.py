import numpy as np
import pytest
import torch

from nvfp4_train.numerics.hadamard import hadamard_matrix, hadamard_transform
from nvfp4_train.numerics.kernels import use
from nvfp4_train.numerics.spec import HADAMARD_SIGN_MASK, HadamardSigns
from tests.support import oracle
from tests.support.tensors import filled, same_bits

SIGNS = list(HadamardSigns)


@pytest.mark.parametrize("signs", SIGNS)
@pytest.mark.parametrize("fill", ["normal", "tiny", "sparse"])
@pytest.mark.parametrize("backend", ["oracle", "compiled"])
def test_sums_are_exact_up_to_the_rounding_to_bf16(signs: HadamardSigns, fill: str, backend: str):
    x = filled(20, 64, dtype=torch.bfloat16, fill=fill, seed=3)
    with use(backend):
        transformed = hadamard_transform(x, signs)
    assert transformed.dtype is torch.bfloat16
    assert np.array_equal(transformed.float().numpy(), oracle.hadamard(x.float().numpy(), HADAMARD_SIGN_MASK[signs]))


def test_the_matrix_is_orthogonal_and_its_rows_carry_the_signs():
    matrix = hadamard_matrix(HadamardSigns.fixed).float()
    assert torch.equal(matrix @ matrix.t(), torch.eye(16))
    assert (matrix[:, 0] < 0).nonzero().flatten().tolist() == [3, 5, 6, 7, 8, 9, 10, 12, 14, 15]


@pytest.mark.parametrize("signs", SIGNS)
def test_the_transform_is_the_matrix(signs: HadamardSigns):
    identity = torch.eye(16, dtype=torch.bfloat16)
    for backend in ("oracle", "compiled"):
        with use(backend):
            assert torch.equal(hadamard_transform(identity, signs), hadamard_matrix(signs))


def test_a_product_is_kept():
    """Transforming both operands along the contraction changes a GEMM by the transform's rounding only."""
    a, b = (filled(32, 128, dtype=torch.bfloat16, fill="normal", seed=seed) for seed in (0, 1))
    transformed = [hadamard_transform(x, HadamardSigns.fixed).double() for x in (a, b)]
    expected = a.double() @ b.double().t()
    error = (transformed[0] @ transformed[1].t() - expected).norm() / expected.norm()
    assert error < 0.01


def test_large_values_do_not_overflow_before_they_must():
    x = torch.zeros(1, 16, dtype=torch.bfloat16)
    x[0, :4] = 3e38
    for backend in ("oracle", "compiled"):
        with use(backend):
            assert hadamard_transform(x, HadamardSigns.none).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_are_rounded_to_bf16_first(dtype: torch.dtype):
    x = filled(4, 32, dtype=dtype, fill="normal", seed=0)
    for backend in ("oracle", "compiled"):
        with use(backend):
            expected = hadamard_transform(x.to(torch.bfloat16), HadamardSigns.fixed)
            assert same_bits(hadamard_transform(x, HadamardSigns.fixed), expected)


def test_more_dims_are_kept():
    x = filled(6, 32, dtype=torch.bfloat16, fill="normal", seed=0)
    transformed = hadamard_transform(x.view(2, 3, 32), HadamardSigns.fixed)
    assert same_bits(transformed, hadamard_transform(x, HadamardSigns.fixed).view(2, 3, 32))


def test_groups_must_be_full():
    with pytest.raises(ValueError, match="multiple of 16 elements, found 24"):
        hadamard_transform(torch.zeros(2, 24, dtype=torch.bfloat16), HadamardSigns.fixed)
