import pytest
import torch

from nvfp4_train.numerics.kernels import native
from nvfp4_train.numerics.layout import pad_scales, swizzle_scales, unswizzle_scales


def test_every_element_is_where_the_formula_says():
    rows, columns = 256, 12
    scales = torch.arange(rows * columns, dtype=torch.int32).view(rows, columns)
    swizzled = swizzle_scales(scales).flatten()
    for r, c in ((0, 0), (1, 0), (31, 3), (32, 0), (127, 3), (128, 4), (200, 11), (255, 7)):
        offset = ((r // 128 * (columns // 4) + c // 4) * 32 + r % 32) * 16 + (r % 128) // 32 * 4 + c % 4
        assert swizzled[offset] == scales[r, c]


def test_unswizzling_undoes_swizzling():
    scales = torch.arange(128 * 8).view(128, 8)
    assert torch.equal(unswizzle_scales(swizzle_scales(scales)), scales)


def test_the_compiled_layout_is_the_same():
    scales = torch.arange(384 * 20, dtype=torch.int32).view(384, 20)
    assert torch.equal(native.swizzle_scales(scales), swizzle_scales(scales))


def test_padding_fills_whole_atoms_with_zeros():
    padded = pad_scales(torch.ones(130, 5, dtype=torch.uint8))
    assert padded.shape == (256, 8)
    assert padded.sum() == 130 * 5


@pytest.mark.parametrize("shape", [(127, 4), (128, 3), (128,)])
def test_partial_atoms_are_refused(shape: tuple[int, ...]):
    with pytest.raises(ValueError, match="do not fill atoms"):
        swizzle_scales(torch.zeros(shape))
