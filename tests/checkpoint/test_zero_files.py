import math

import pytest
import torch
from torch import Size

from nvfp4_train.checkpoint.error import CheckpointError
from nvfp4_train.checkpoint.zero_files import (
    TAG,
    Layout,
    Piece,
    locate,
    read_header,
    read_parameters,
    write_parameters,
)

GROUPS = [{"a": Size([3, 5]), "b": Size([7])}, {"c": Size([1]), "d": Size([2, 2]), "e": Size([])}]


def layout(stage: int, num_ranks: int) -> Layout:
    return Layout(stage=stage, num_ranks=num_ranks, groups=GROUPS)


def test_stages_1_and_2_cut_a_group_in_equal_pieces():
    """22 elements are padded to 24, which 2 ranks share in even pieces."""
    for stage in (1, 2):
        first, second = (locate(layout(stage, 2), rank=rank) for rank in range(2))
        assert (first["a"], first["b"].size) == (Piece(group=0, start=0, offset=0, size=12), 0)
        assert second["a"] == Piece(group=0, start=0, offset=12, size=3)
        assert second["b"] == Piece(group=0, start=3, offset=0, size=7)


def test_stage_3_cuts_each_parameter():
    """15 elements make pieces of 8 and 7, with the place of an eighth."""
    first, second = (locate(layout(3, 2), rank=rank) for rank in range(2))
    assert first["a"] == Piece(group=0, start=0, offset=0, size=8)
    assert second["a"] == Piece(group=0, start=0, offset=8, size=7)
    assert (first["b"], second["b"]) == (
        Piece(group=0, start=8, offset=0, size=4),
        Piece(group=0, start=8, offset=4, size=3),
    )
    assert (first["c"].size, second["c"].size) == (1, 0)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8])
def test_the_pieces_of_all_ranks_are_the_parameter(stage, num_ranks):
    pieces = [locate(layout(stage, num_ranks), rank=rank) for rank in range(num_ranks)]
    for group in GROUPS:
        for name, shape in group.items():
            whole = torch.arange(math.prod(shape)).view(shape)
            parts = [own[name].of_whole(whole) for own in pieces]
            assert torch.equal(torch.cat(parts), whole.flatten())


def test_pieces_of_a_rank_do_not_overlap():
    for stage in (1, 3):
        for rank in range(3):
            for index in range(2):
                pieces = [piece for piece in locate(layout(stage, 3), rank=rank).values() if piece.group == index]
                pieces = sorted((piece for piece in pieces if piece.size), key=lambda piece: piece.start)
                ends = [piece.start + piece.size for piece in pieces]
                assert all(end <= piece.start for end, piece in zip(ends, pieces[1:], strict=False))


def state() -> dict[str, dict]:
    values = {"a": torch.randn(3, 5), "b": torch.randn(7)}
    optimizer = {
        name: {"step": torch.tensor(4.0), "exp_avg": value + 1, "exp_avg_sq": value + 2}
        for name, value in values.items()
    }
    return {"model": {**values, "counts": torch.arange(3)}, "optimizer": optimizer}


def test_what_is_written_is_read_again(tmp_path):
    written = state()
    write_parameters(written, tmp_path)
    header = read_header(tmp_path)
    assert header.layout == Layout(stage=1, num_ranks=1, groups=[{"a": Size([3, 5]), "b": Size([7])}])
    assert header.shapes == {"a": Size([3, 5]), "b": Size([7]), "counts": Size([3])}
    assert torch.equal(header.common["counts"], torch.arange(3))
    for name, tensors in read_parameters(tmp_path, header):
        assert torch.equal(tensors["master"], written["model"][name])
        assert all(torch.equal(tensors[key], value) for key, value in written["optimizer"][name].items())


def test_before_the_first_update_the_optimizer_has_no_state(tmp_path):
    write_parameters(state(), tmp_path)
    (file,) = (tmp_path / TAG).glob("*_optim_states.pt")
    saved = torch.load(file, weights_only=False)
    saved["optimizer_state_dict"]["base_optimizer_state"]["state"] = {}
    torch.save(saved, file)
    for _, tensors in read_parameters(tmp_path, read_header(tmp_path)):
        assert not tensors["exp_avg"].any()
        assert not tensors["step"]


def test_a_missing_or_strange_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"mp_rank_00_model_states.pt could not be read"):
        read_header(tmp_path)
    write_parameters(state(), tmp_path)
    torch.save({"something": 1}, tmp_path / TAG / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match=r"mp_rank_00_model_states.pt could not be read: KeyError"):
        read_header(tmp_path)


def test_a_file_of_another_model_is_named(tmp_path):
    write_parameters(state(), tmp_path)
    header = read_header(tmp_path)
    larger = Layout(stage=1, num_ranks=1, groups=[{"a": Size([30, 5]), "b": Size([7])}])
    with pytest.raises(CheckpointError, match="could not be read"):
        list(read_parameters(tmp_path, type(header)(layout=larger, common={})))
