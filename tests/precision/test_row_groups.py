import pytest
import torch

from nvfp4_train.numerics.spec import Format
from nvfp4_train.precision.row_groups import NO_GROUPS, RowGroups
from tests.support.recipes import cast_table, nvfp4_table


def test_groups_are_filled_up_to_whole_blocks():
    assert RowGroups.of(168, nvfp4_table()) == RowGroups(168, 8)


@pytest.mark.parametrize("size", [0, 16, 160])
def test_whole_blocks_need_no_filling(size):
    assert RowGroups.of(size, nvfp4_table()) == NO_GROUPS


def test_casts_need_no_filling():
    assert RowGroups.of(168, cast_table(Format.bf16)) == NO_GROUPS


@pytest.mark.parametrize("dim", [0, 1])
def test_zeros_stand_behind_each_group_and_go_again(dim):
    groups = RowGroups(3, 2)
    x = torch.arange(1.0, 13.0).view(6, 2)
    x = x if dim == 0 else x.t()
    padded = groups.pad(x, dim=dim)
    assert padded.shape[dim] == 10
    rows = padded if dim == 0 else padded.t()
    assert rows[:, 0].tolist() == [1.0, 3.0, 5.0, 0.0, 0.0, 7.0, 9.0, 11.0, 0.0, 0.0]
    assert torch.equal(groups.crop(padded, dim=dim), x)


def test_without_groups_nothing_changes():
    x = torch.ones(3, 4)
    assert NO_GROUPS.pad(x, dim=0) is x
    assert NO_GROUPS.crop(x, dim=1) is x
    assert NO_GROUPS.padded_index(7) == 7


def test_index_of_a_group_among_padded_ones():
    assert [RowGroups(3, 2).padded_index(row) for row in (0, 3, 6)] == [0, 5, 10]
