import pytest
import torch
import torch.nn.functional as F

from nvfp4_train.model.loss import CHUNK_ELEMENTS_CPU, IGNORE_INDEX, cross_entropy_sum

ROWS = CHUNK_ELEMENTS_CPU // 11  # tokens per chunk of these logits


def draw(*, tokens, dtype=torch.float32):
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(tokens, 11, generator=rng).mul(3).to(dtype).requires_grad_()
    labels = torch.randint(0, 11, (tokens,), generator=rng)
    labels[::3] = IGNORE_INDEX
    return logits, labels


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


def test_nothing_counted_is_zero():
    logits, labels = draw(tokens=4)
    loss = cross_entropy_sum(logits, torch.full_like(labels, IGNORE_INDEX))
    loss.backward()
    assert loss == 0
    assert not logits.grad.any()


def test_nan_is_not_hidden():
    logits, labels = draw(tokens=4)
    with torch.no_grad():
        logits[1, 3] = torch.nan
    assert cross_entropy_sum(logits, labels).isnan()
