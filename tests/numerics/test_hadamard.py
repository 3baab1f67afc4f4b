import numpy as np
import pytest
import torch

from nvfp4_train.numerics.hadamard import (
    FIXED_SIGN_MASK,
    drawn_sign_mask,
    fixed_sign_mask,
    hadamard_matrix,
    hadamard_transform,
    transform_mask,
)
from nvfp4_train.numerics.kernels import use
from nvfp4_train.numerics.spec import HADAMARD_SIZES, HadamardSigns
from tests.support import oracle
from tests.support.tensors import filled, operand_spec, same_bits

FIXED = [HadamardSigns.none, HadamardSigns.fixed]
DRAWN = [HadamardSigns.per_layer, HadamardSigns.per_call]
WHERE = {"seed": 1, "layer": "blocks.0.mixer.in_proj", "step": 3, "row": 512}


@pytest.mark.parametrize("size", HADAMARD_SIZES)
@pytest.mark.parametrize("fill", ["normal", "tiny", "sparse"])
@pytest.mark.parametrize("backend", ["oracle", "compiled"])
def test_sums_are_exact_up_to_the_rounding_to_bf16(size: int, fill: str, backend: str):
    """FP32 sums and the factor sqrt(1/2) of odd powers of two may move a value across a rounding boundary of BF16."""
    x = filled(20, 256, dtype=torch.bfloat16, fill=fill, seed=3)
    mask = drawn_sign_mask(HadamardSigns.per_call, **WHERE)
    with use(backend):
        transformed = hadamard_transform(x, size=size, sign_mask=mask)
    assert transformed.dtype is torch.bfloat16
    expected = torch.from_numpy(oracle.hadamard(x.float().numpy(), mask, size=size))
    different = transformed.float() != expected
    assert different.float().mean() <= (0.0 if size in (4, 16) else 1e-3)
    torch.testing.assert_close(transformed.float(), expected, rtol=2.0**-7, atol=0)


def test_the_matrix_is_orthogonal_and_its_rows_carry_the_signs():
    matrix = hadamard_matrix(HadamardSigns.fixed).float()
    assert torch.equal(matrix @ matrix.t(), torch.eye(16))
    assert (matrix[:, 0] < 0).nonzero().flatten().tolist() == [3, 5, 6, 7, 8, 9, 10, 12, 14, 15]


@pytest.mark.parametrize("signs", FIXED)
def test_the_transform_is_the_matrix(signs: HadamardSigns):
    identity = torch.eye(16, dtype=torch.bfloat16)
    for backend in ("oracle", "compiled"):
        with use(backend):
            transformed = hadamard_transform(identity, size=16, sign_mask=fixed_sign_mask(signs))
            assert torch.equal(transformed, hadamard_matrix(signs))


@pytest.mark.parametrize("size", HADAMARD_SIZES)
def test_a_product_is_kept(size: int):
    """Transforming both operands along the contraction changes a GEMM by the transform's rounding only."""
    a, b = (filled(32, 128, dtype=torch.bfloat16, fill="normal", seed=seed) for seed in (0, 1))
    mask = drawn_sign_mask(HadamardSigns.per_layer, **WHERE)
    transformed = [hadamard_transform(x, size=size, sign_mask=mask).double() for x in (a, b)]
    expected = a.double() @ b.double().t()
    error = (transformed[0] @ transformed[1].t() - expected).norm() / expected.norm()
    assert error < 0.01


def test_fixed_signs_repeat_the_published_sixteen():
    assert [FIXED_SIGN_MASK >> 16 * part & 0xFFFF for part in range(8)] == [0xD7E8] * 8
    with pytest.raises(ValueError, match="per_call are drawn"):
        fixed_sign_mask(HadamardSigns.per_call)


def test_signs_per_layer_depend_on_the_seed_and_the_layer_only():
    mask = drawn_sign_mask(HadamardSigns.per_layer, **WHERE)
    assert mask == drawn_sign_mask(HadamardSigns.per_layer, **WHERE | {"step": 9, "row": 0})
    for change in ({"seed": 2}, {"layer": "blocks.1.mixer.in_proj"}):
        assert mask != drawn_sign_mask(HadamardSigns.per_layer, **WHERE | change)


def test_signs_per_call_depend_on_everything():
    masks = {drawn_sign_mask(HadamardSigns.per_call, **WHERE)}
    masks |= {
        drawn_sign_mask(HadamardSigns.per_call, **WHERE | change)
        for change in ({"seed": 2}, {"layer": "lm_head"}, {"step": 4}, {"row": 0})
    }
    assert len(masks) == 5


def test_drawn_signs_are_fair():
    masks = [drawn_sign_mask(HadamardSigns.per_call, **WHERE | {"step": step}) for step in range(400)]
    signs = np.array([[mask >> i & 1 for i in range(128)] for mask in masks])
    assert abs(signs.mean() - 0.5) < 4 * 0.5 / signs.size**0.5
    assert (np.abs(signs.mean(axis=0) - 0.5) < 5 * 0.5 / 400**0.5).all()


def test_signs_that_do_not_belong_to_a_spec_are_refused():
    drawn, fixed = operand_spec(hadamard=HadamardSigns.per_call), operand_spec(hadamard=HadamardSigns.fixed)
    assert transform_mask(drawn, 5) == 5
    assert transform_mask(fixed, None) == FIXED_SIGN_MASK
    with pytest.raises(ValueError, match="per_call are drawn; pass sign_mask"):
        transform_mask(drawn, None)
    with pytest.raises(ValueError, match="fixed are not drawn, found sign_mask 0x5"):
        transform_mask(fixed, 5)
    with pytest.raises(ValueError, match="fixed are not drawn"):
        drawn_sign_mask(HadamardSigns.fixed, **WHERE)


def test_large_values_do_not_overflow_before_they_must():
    x = torch.zeros(1, 16, dtype=torch.bfloat16)
    x[0, :4] = 3e38
    for backend in ("oracle", "compiled"):
        with use(backend):
            assert hadamard_transform(x, size=16, sign_mask=0).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_are_rounded_to_bf16_first(dtype: torch.dtype):
    x = filled(4, 32, dtype=dtype, fill="normal", seed=0)
    for backend in ("oracle", "compiled"):
        with use(backend):
            expected = hadamard_transform(x.to(torch.bfloat16), size=16, sign_mask=FIXED_SIGN_MASK)
            assert same_bits(hadamard_transform(x, size=16, sign_mask=FIXED_SIGN_MASK), expected)


def test_more_dims_are_kept():
    x = filled(6, 32, dtype=torch.bfloat16, fill="normal", seed=0)
    transformed = hadamard_transform(x.view(2, 3, 32), size=32, sign_mask=5)
    assert same_bits(transformed, hadamard_transform(x, size=32, sign_mask=5).view(2, 3, 32))


def test_groups_must_be_full():
    with pytest.raises(ValueError, match="multiple of 16 elements, found 24"):
        hadamard_transform(torch.zeros(2, 24, dtype=torch.bfloat16), size=16, sign_mask=0)
