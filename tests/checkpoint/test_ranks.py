import pytest
import torch.distributed as dist

from nvfp4_train.checkpoint.ranks import gather_from_ranks, has_ranks, is_first_rank, num_ranks
from nvfp4_train.parallel.runtime import Runtime
from tests.support.ranks import run_on_ranks


def test_a_process_without_a_group_is_the_only_rank():
    assert not dist.is_initialized()
    assert (has_ranks(), is_first_rank(), num_ranks(), gather_from_ranks("a")) == (False, True, 1, ["a"])


def describe(runtime: Runtime) -> tuple[bool, bool, int, list[str]]:
    return has_ranks(), is_first_rank(), num_ranks(), gather_from_ranks(f"said by {runtime.rank}")


@pytest.mark.distributed
def test_values_come_in_the_order_of_ranks():
    said = ["said by 0", "said by 1"]
    assert run_on_ranks(describe, 2) == [(True, True, 2, said), (True, False, 2, said)]
