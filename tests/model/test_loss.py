import pytest
import torch
import torch.nn.functional as F

from nvfp4_train.model.loss import CHUNK_ELEMENTS_CPU, IGNORE_INDEX, cross_entropy_sum, cross_entropy_sum_
from nvfp4_train.numerics.kernels import Backend, use

ROWS = CHUNK_ELEMENTS_CPU // 11  # tokens per chunk of these logits


def draw(*, tokens, dtype=torch.float32):
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(tokens, 11, generator=rng).mul(3).to(dtype).requires_grad_()
    labels = torch.randint(0, 11, (tokens,), generator=rng)
    labels[::3] = IGNORE_INDEX
    return logits, labels


@pytest.fixture(params=[Backend.auto, Backend.oracle])
def backend(request):
    with use(request.param):
        yield request.param


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 5, ROWS, 2 * ROWS + 3])
def test_equals_torch(tokens, dtype):
    logits, labels = draw(tokens=tokens, dtype=dtype)
    precise = logits.detach().float().requires_grad_()
    loss = cross_entropy_sum(logits, labels)
    wanted = F.cross_entropy(precise, labels, ignore_index=IGNORE_INDEX, reduction="sum")
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, wanted)
    (loss * 0.5).backward()
    (wanted * 0.5).backward()
    torch.testing.assert_close(
        logits.grad, precise.grad.to(dtype), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6
    )


def test_gradients_match_finite_differences():
    logits, labels = draw(tokens=4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda logits: cross_entropy_sum(logits, labels), logits)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_gradient_can_take_the_place_of_the_logits(dtype):
    leaf, labels = draw(tokens=7, dtype=dtype)
    (wanted,) = torch.autograd.grad(cross_entropy_sum(leaf, labels), leaf)
    logits, places = leaf * 1, []
    logits.register_hook(lambda grad: places.append(grad.data_ptr()))
    cross_entropy_sum_(logits, labels).backward()
    assert places == [logits.data_ptr()]
    assert torch.equal(leaf.grad, wanted)


@pytest.mark.usefixtures("backend")
def test_logits_that_are_read_again_are_not_overwritten_silently():
    leaf, labels = draw(tokens=7)
    logits = leaf * 1
    loss = cross_entropy_sum_(logits, labels) + logits.square().sum()
    loss = loss + cross_entropy_sum_(logits, labels)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_label_beyond_the_vocabulary_is_an_error():
    logits, labels = draw(tokens=4)
    labels[1] = 11
    with pytest.raises((IndexError, RuntimeError), match=r"found 11|index 11 is out of bounds"):
        cross_entropy_sum(logits, labels)


@pytest.mark.usefixtures("backend")
def test_nothing_counted_is_zero():
    logits, labels = draw(tokens=4)
    loss = cross_entropy_sum(logits, torch.full_like(labels, IGNORE_INDEX))
    loss.backward()
    assert loss == 0
    assert not logits.grad.any()


@pytest.mark.usefixtures("backend")
def test_nan_is_not_hidden():
    logits, labels = draw(tokens=4)
    with torch.no_grad():
        logits[1, 3] = torch.nan
    assert cross_entropy_sum(logits, labels).isnan()
