import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nvfp4_train.model.loss import IGNORE_INDEX
from nvfp4_train.model.loss import cross_entropy_sum as of_one_rank
from nvfp4_train.parallel import vocabulary
from nvfp4_train.parallel.runtime import Runtime
from tests.support.ranks import run_on_ranks

NUM_RANKS = 2
VOCAB = 12


def case(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    logits = (torch.randn(7, VOCAB, generator=rng, dtype=torch.float64) * 30).to(dtype)
    labels = torch.randint(VOCAB, (7,), generator=rng)
    labels[2] = IGNORE_INDEX
    return logits, labels


def on_rank(runtime: Runtime) -> dict[str, tuple[float, Tensor]]:
    found = {}
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        logits, labels = case(dtype)
        own = logits.chunk(NUM_RANKS, dim=1)[runtime.rank].clone().requires_grad_()
        for name, elements in (("", vocabulary.CHUNK_ELEMENTS), (" in chunks", VOCAB)):
            vocabulary.CHUNK_ELEMENTS = elements
            own.grad = None
            loss = vocabulary.cross_entropy_sum_(own * 1, labels, group=dist.group.WORLD)
            (loss * 0.5).backward()
            found[f"{dtype}{name}"] = (loss.item(), own.grad.clone())
    return found


@pytest.mark.distributed
def test_loss_and_gradient_are_those_of_all_logits_together():
    ranks = run_on_ranks(on_rank, NUM_RANKS)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-12), (torch.bfloat16, 1e-2)):
        logits, labels = case(dtype)
        logits.requires_grad_()
        loss = of_one_rank(logits * 1, labels)
        (loss * 0.5).backward()
        for rank, found in enumerate(ranks):
            for name in (f"{dtype}", f"{dtype} in chunks"):
                value, gradient = found[name]
                assert value == pytest.approx(loss.item(), rel=1e-6)
                expected = logits.grad.chunk(NUM_RANKS, dim=1)[rank]
                torch.testing.assert_close(gradient, expected, rtol=tolerance, atol=tolerance)
                assert gradient[2].abs().max() == 0
