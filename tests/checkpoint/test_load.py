import pytest
import torch

from nvfp4_train.checkpoint.error import CheckpointError
from nvfp4_train.checkpoint.load import load_checkpoint
from nvfp4_train.checkpoint.save import save_checkpoint
from nvfp4_train.checkpoint.state import State

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def make_state(*, width: int = 3, names: tuple[str, ...] = ("a.weight", "b.weight")) -> State:
    return {
        "model": {name: torch.zeros(4, width) for name in names},
        "optimizer": {name: {"exp_avg": torch.zeros(4, width), "step": torch.zeros(())} for name in names},
    }


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "step_00000002"
    state = make_state()
    state["model"]["a.weight"] += torch.arange(3)
    state["optimizer"]["b.weight"]["step"] += 2
    save_checkpoint(path, state, engine="torch", step=2, metadata={"x": 1})
    return path


def test_tensors_are_filled_in_place(saved):
    state = make_state()
    weight = state["model"]["a.weight"]
    info = load_checkpoint(saved, state, engine="torch")
    assert torch.equal(weight, torch.arange(3.0).expand(4, 3))
    assert state["optimizer"]["b.weight"]["step"] == 2
    assert (info.step, info.metadata) == (2, {"x": 1})


def test_a_checkpoint_of_another_model_is_described_and_nothing_is_overwritten(saved):
    state = make_state(width=5, names=("a.weight", "c.weight"))
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(saved, state, engine="torch")
    message = str(caught.value)
    assert "is of another model or optimizer" in message
    assert "3 not in the checkpoint: model.c.weight, optimizer.c.weight.exp_avg, optimizer.c.weight.step" in message
    assert "3 only in the checkpoint: model.b.weight" in message
    assert "2 of another shape: model.a.weight (saved (4, 3), here (4, 5))" in message
    assert not state["model"]["a.weight"].any()


def test_long_lists_are_cut(saved):
    state = make_state(names=tuple(f"layer{index}.weight" for index in range(9)))
    with pytest.raises(CheckpointError, match=r"27 not in the checkpoint: .* and 22 more"):
        load_checkpoint(saved, state, engine="torch")


def test_another_engine_is_refused(saved):
    with pytest.raises(CheckpointError, match="was saved by the engine torch, this run uses deepspeed"):
        load_checkpoint(saved, make_state(), engine="deepspeed")


def test_an_incomplete_checkpoint_is_refused(saved):
    (saved / "COMPLETE").unlink()
    with pytest.raises(CheckpointError, match="no COMPLETE marker"):
        load_checkpoint(saved, make_state(), engine="torch")


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_missing_file_is_one_clear_error(saved, name):
    (saved / name).unlink()
    with pytest.raises(CheckpointError, match=r"step_00000002 could not be read: .*No such file"):
        load_checkpoint(saved, make_state(), engine="torch")


def test_a_truncated_file_is_one_clear_error(saved):
    file = saved / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(CheckpointError, match="step_00000002 could not be read"):
        load_checkpoint(saved, make_state(), engine="torch")


@pytest.mark.parametrize("content", [b"", b"garbage" * 9, b"\x80\x04N.", pytest.param(None, id="cut in half")])
def test_a_damaged_table_of_contents_is_one_clear_error(saved, content):
    file = saved / ".metadata"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2] if content is None else content)
    with pytest.raises(CheckpointError, match=r"step_00000002 could not be read: .*\n    fix: "):
        load_checkpoint(saved, make_state(), engine="torch")


def test_pytorch_does_not_talk_users_into_unsafe_loading(saved):
    file = saved / "__0_0.distcp"
    file.write_bytes(b"\xf3" * file.stat().st_size)
    with pytest.raises(CheckpointError, match="step_00000002 could not be read") as caught:
        load_checkpoint(saved, make_state(), engine="torch")
    assert "weights_only" not in str(caught.value)
