"""A run goes on whatever saved it: the engine, the stage, the number of ranks."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_train.checkpoint.error import CheckpointError
from nvfp4_train.checkpoint.folder import is_complete, read_info
from nvfp4_train.checkpoint.state import State, collect_state
from nvfp4_train.config.recipe import ComputeDtype
from nvfp4_train.config.run import Device
from nvfp4_train.engine.base import Engine
from nvfp4_train.engine.convert import convert_checkpoint
from nvfp4_train.parallel.runtime import Runtime, start_runtime, stop_runtime
from tests.support.deepspeed import needs_deepspeed, saved_state
from tests.support.engines import build_tiny_engine, train
from tests.support.ranks import run_on_ranks
from tests.support.recipes import cast_recipe
from tests.support.tiny import deepspeed_engine, tiny_model

pytestmark = [needs_deepspeed, pytest.mark.distributed]

SAVED_STEP = 2
NAME = "step_00000002"
# What loads what: (stage or torch, ranks) by (stage or torch, ranks). In between, converted where the engine changes.
PAIRS_ON_ONE_RANK = {"torch": ["1x2", "2x2", "3x2"], "1": ["3x2", "torch"], "3": ["1x2", "torch"]}
PAIRS_ON_TWO_RANKS = {"torch": ["2x1"], "2": ["2x1", "torch"], "3": ["2x1"]}


def build(runtime: Runtime, kind: str, *, seed: int = 0) -> Engine:
    cfg = None if kind == "torch" else deepspeed_engine(int(kind))
    return build_tiny_engine(runtime, cast_recipe(ComputeDtype.fp32), model=tiny_model("M*E"), engine=cfg, seed=seed)


def saved(runtime: Runtime, kind: str, path: Path) -> tuple[float, float]:
    """Train, save and take the next step."""
    engine = build(runtime, kind)
    train(engine, range(SAVED_STEP))
    engine.save(path, {"tokens": 256})
    (following,) = train(engine, range(SAVED_STEP, SAVED_STEP + 1))
    engine.close()
    return following


def loaded(runtime: Runtime, kind: str, path: Path) -> tuple[float, float]:
    """Load into an engine with other weights and take the next step."""
    engine = build(runtime, kind, seed=7)
    assert engine.load(path) == {"tokens": 256}
    assert engine.step == SAVED_STEP
    (following,) = train(engine, range(SAVED_STEP, SAVED_STEP + 1))
    counted = {float(state["step"]) for state in engine._optimizer.state.values()}  # type: ignore[attr-defined]
    assert counted == {SAVED_STEP + 1}
    engine.close()
    return following


def save_on_two_ranks(runtime: Runtime, folder: Path) -> None:
    for stage in "123":
        saved(runtime, stage, folder / f"{stage}x2" / NAME)


def go_on(runtime: Runtime, folder: Path, pairs: dict[str, list[str]]) -> dict[tuple[str, str], Any]:
    found: dict[tuple[str, str], Any] = {}
    for kind, sources in pairs.items():
        for source in sources:
            converted = folder / f"{source}_converted" / NAME
            is_same_engine = (kind == "torch") == (source == "torch")
            found[kind, source] = loaded(runtime, kind, folder / source / NAME if is_same_engine else converted)
    if runtime.world_size == 1:
        found["saved", "2x1"] = saved(runtime, "2", folder / "2x1" / NAME)
    return found


def flat(state: State) -> dict[str, Tensor]:
    found = dict(state["model"])
    for name, tensors in state["optimizer"].items():
        found |= {f"{name}/{key}": tensor for key, tensor in tensors.items()}
    return {name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for name, tensor in found.items()}


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    yield start_runtime(Device.cpu)
    stop_runtime()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def following(runtime, folder) -> tuple[float, float]:
    """The unbroken run, and every checkpoint, for both engines."""
    step = saved(runtime, "torch", folder / "torch" / NAME)
    run_on_ranks(save_on_two_ranks, 2, folder, timeout_seconds=600)
    for source in ("torch", "1x2", "2x2", "3x2"):
        convert_checkpoint(folder / source / NAME, folder / f"{source}_converted" / NAME)
    return step


@pytest.fixture(scope="module")
def on_one_rank(following, folder) -> dict[tuple[str, str], Any]:
    (found,) = run_on_ranks(go_on, 1, folder, PAIRS_ON_ONE_RANK, timeout_seconds=600)
    convert_checkpoint(folder / "2x1" / NAME, folder / "2x1_converted" / NAME)
    return found


@pytest.fixture(scope="module")
def on_two_ranks(on_one_rank, folder) -> dict[tuple[str, str], Any]:
    found, other = run_on_ranks(go_on, 2, folder, PAIRS_ON_TWO_RANKS, timeout_seconds=600)
    assert found == other
    return found


def test_one_rank_goes_on_with_what_two_saved(following, on_one_rank):
    assert len(on_one_rank) == 8
    for pair, found in on_one_rank.items():
        assert found == pytest.approx(following, rel=1e-6), pair


def test_two_ranks_go_on_with_what_one_saved(following, on_two_ranks):
    assert len(on_two_ranks) == 4
    for pair, found in on_two_ranks.items():
        assert found == pytest.approx(following, rel=1e-6), pair


@pytest.mark.parametrize("source", ["1x2", "2x2", "3x2"])
def test_every_tensor_is_taken_over(runtime, following, folder, source):
    engine = build(runtime, "torch", seed=7)
    engine.load(folder / f"{source}_converted" / NAME)
    found = flat(collect_state(engine.model, engine._optimizer))  # type: ignore[attr-defined]
    expected = saved_state(folder / source / NAME)
    assert found.keys() == {name.removesuffix("/master") for name in expected}
    for name, tensor in expected.items():
        assert torch.equal(found[name.removesuffix("/master")], tensor), name
    assert {float(tensor) for name, tensor in expected.items() if name.endswith("/step")} == {2.0}
    original = build(runtime, "torch")
    original.load(folder / "torch" / NAME)
    for name, tensor in flat(collect_state(original.model, original._optimizer)).items():  # type: ignore[attr-defined]
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


def test_there_and_back_is_bitwise_the_same(runtime, following, folder):
    back = folder / "torch_back" / NAME
    convert_checkpoint(folder / "torch_converted" / NAME, back)
    engines = [build(runtime, "torch", seed=seed) for seed in (5, 6)]
    states = []
    for engine, path in zip(engines, (back, folder / "torch" / NAME), strict=True):
        engine.load(path)
        states.append(flat(collect_state(engine.model, engine._optimizer)))  # type: ignore[attr-defined]
    assert states[0].keys() == states[1].keys()
    assert [name for name in states[0] if not torch.equal(states[0][name], states[1][name])] == []


def test_what_was_recorded_is_taken_over(following, folder):
    info = read_info(folder / "3x2_converted" / NAME)
    assert (info.engine, info.step, info.metadata) == ("torch", SAVED_STEP, {"tokens": 256})
    assert read_info(folder / "torch_converted" / NAME).engine == "deepspeed"


def test_a_target_that_exists_is_left_alone(following, folder):
    with pytest.raises(CheckpointError, match="exists already"):
        convert_checkpoint(folder / "1x2" / NAME, folder / "torch" / NAME)
    assert read_info(folder / "torch" / NAME).engine == "torch"


def test_a_missing_or_damaged_file_is_named_and_nothing_is_written(following, folder, tmp_path):
    source, target = tmp_path / NAME, tmp_path / "converted" / NAME
    source.mkdir()
    for file in (folder / "1x2" / NAME).rglob("*"):
        if file.is_file():
            copy = source / file.relative_to(folder / "1x2" / NAME)
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes(file.read_bytes())
    shard = next(source.rglob("zero_pp_rank_1_*_optim_states.pt"))
    shard.write_bytes(shard.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"zero_pp_rank_1_mp_rank_00_optim_states.pt could not be read"):
        convert_checkpoint(source, target)
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"zero_pp_rank_1_mp_rank_00_optim_states.pt could not be read"):
        convert_checkpoint(source, target)
    assert not is_complete(target)


def copy_of(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def test_half_a_checkpoint_of_the_torch_engine_is_named(following, folder, tmp_path):
    source = copy_of(folder / "torch" / NAME, tmp_path / NAME)
    next(source.glob("*.distcp")).unlink()
    with pytest.raises(CheckpointError, match="could not be read"):
        convert_checkpoint(source, tmp_path / "converted" / NAME)
    assert not (tmp_path / "converted" / NAME).exists()


def test_what_cannot_be_a_target_or_a_source_is_refused(following, folder, tmp_path):
    source = copy_of(folder / "torch" / NAME, tmp_path / NAME)
    with pytest.raises(CheckpointError, match="outside of what is converted"):
        convert_checkpoint(source, source / "inside")
    info = source / "metadata.json"
    info.write_text(info.read_text().replace('"torch"', '"other"'))
    with pytest.raises(CheckpointError, match="of engine 'other'"):
        convert_checkpoint(source, tmp_path / "converted" / NAME)
