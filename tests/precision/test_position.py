"""The position of a run."""

import pytest
import torch

from nvfp4_train.numerics.spec import Format, GemmMode, Rounding
from nvfp4_train.precision.linear import LinearPrecision, QuantizedLinear
from nvfp4_train.precision.position import RoundingPosition
from tests.support.recipes import cast_table, nvfp4_spec, nvfp4_table


def test_a_microbatch_sets_where_it_is_and_leaves_the_weights_alone():
    position = RoundingPosition(seed=1, weight_version=4)
    position.start_microbatch(step=7, row_offset=1024)
    assert position == RoundingPosition(seed=1, step=7, row_offset=1024, weight_version=4)


def test_changed_weights_have_a_new_version_each_time():
    position = RoundingPosition(seed=1)
    position.weights_changed()
    position.weights_changed()
    assert position.weight_version == 2


def test_a_microbatch_of_slices_says_where_they_are():
    position = RoundingPosition(seed=1)
    position.start_microbatch(step=7, row_offset=1024 + 64, segment=64, stride=256)
    assert (position.row_offset, position.segment, position.stride) == (1088, 64, 256)
    position.start_microbatch(step=7, row_offset=2048)
    assert (position.row_offset, position.segment, position.stride) == (2048, 0, 0)


@pytest.mark.parametrize(("segment", "stride"), [(24, 96), (32, 0), (32, 16), (0, 64), (32, 90)])
def test_slices_that_streams_cannot_follow_are_refused(segment: int, stride: int):
    position = RoundingPosition(seed=1)
    with pytest.raises(ValueError, match="must be"):
        position.start_microbatch(step=0, row_offset=0, segment=segment, stride=stride)
    assert position == RoundingPosition(seed=1)


def test_a_snapshot_brings_a_forward_back_but_not_old_weights():
    position = RoundingPosition(seed=1)
    position.start_microbatch(step=3, row_offset=96, segment=32, stride=64)
    snapshot = position.snapshot()
    position.start_microbatch(step=3, row_offset=128)
    position.high_precision = True
    position.weights_changed()
    later = position.snapshot()
    position.restore(snapshot)
    assert position == RoundingPosition(seed=1, step=3, row_offset=96, segment=32, stride=64, weight_version=1)
    position.restore(later)
    assert position == RoundingPosition(seed=1, step=3, row_offset=128, high_precision=True, weight_version=1)


def test_a_recomputed_forward_rounds_as_the_first_did():
    """What a pipeline with activation checkpointing does: other microbatches come between forward and recomputation."""
    recipe = nvfp4_table()
    recipe.fprop.x = nvfp4_spec(rounding=Rounding.stochastic)
    position = RoundingPosition(seed=1)
    precision = LinearPrecision(
        layer="proj", recipe_name="", recipe=recipe, high_precision=cast_table(Format.bf16), gemm=GemmMode.auto
    )
    linear = QuantizedLinear(32, 32, bias=False, precision=precision, position=position)
    torch.nn.init.normal_(linear.weight, generator=torch.Generator().manual_seed(0))
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    position.start_microbatch(step=0, row_offset=0)
    snapshot, first = position.snapshot(), linear(x)
    position.start_microbatch(step=0, row_offset=32)
    second = linear(x)
    position.restore(snapshot)
    assert torch.equal(linear(x), first)
    assert not torch.equal(first, second)
