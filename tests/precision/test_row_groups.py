import pytest
import torch
from torch import Tensor

from nvfp4_train.numerics.spec import Format
from nvfp4_train.precision.linear import QuantizedLinear
from nvfp4_train.precision.row_groups import NO_GROUPS, RowGroups
from tests.precision.test_linear import INPUTS, OUTPUTS, TOKENS, make_data, make_linear, run
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


def second_half_changed(linear: QuantizedLinear) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Run with two weights, and gradients, that differ in the second group of 24 rows; the first has the largest."""
    x, dy = make_data()
    dy[0, 0] = 1.0
    with torch.no_grad():
        linear.weight[0, 0] = 4.0
    before = run(linear, x, dy)
    with torch.no_grad():
        linear.weight[24:] *= -0.5
    linear.position.weights_changed()
    return before, run(linear, x, torch.cat([dy[:, :24], dy[:, 24:] * -0.5], dim=1))


def test_groups_of_rows_do_not_see_each_other():
    """24 rows end in the middle of a block of 16."""
    linear = make_linear(nvfp4_table())
    linear.group_rows = 24
    before, after = second_half_changed(linear)
    assert before["y"].shape == (TOKENS, OUTPUTS)
    assert before["dw"].shape == (OUTPUTS, INPUTS)
    assert torch.equal(before["y"][:, :24], after["y"][:, :24])
    assert torch.equal(before["dw"][:24], after["dw"][:24])
    assert not torch.equal(before["y"][:, 24:], after["y"][:, 24:])
    mixed, others = second_half_changed(make_linear(nvfp4_table()))
    assert not torch.equal(mixed["y"][:, :24], others["y"][:, :24])


def test_filling_up_groups_costs_no_accuracy():
    x, dy = make_data()
    linear, plain = make_linear(nvfp4_table()), make_linear(nvfp4_table())
    linear.group_rows = 24
    exact = run(make_linear(cast_table(Format.fp32)), x.float(), dy.float())
    for name, found in run(linear, x, dy).items():
        expected = exact[name].double()
        error, usual = ((other.double() - expected).norm() for other in (found, run(plain, x, dy)[name]))
        assert error < 1.1 * usual
