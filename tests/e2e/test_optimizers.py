"""Every optimizer, however its state is kept, trains the same on one rank, on two, and after a resume."""

from pathlib import Path

import pytest

from nvfp4_train.config.optimizer import OptimizerConfig, StateDtype, StateOffload
from nvfp4_train.config.recipe import ComputeDtype
from nvfp4_train.engine.base import Engine
from nvfp4_train.engine.build import build_engine, prepare_model
from nvfp4_train.parallel.mesh import build_mesh
from nvfp4_train.parallel.runtime import Runtime
from tests.support.engines import train
from tests.support.ranks import run_on_ranks
from tests.support.recipes import cast_recipe
from tests.support.tiny import SEQUENCE_LENGTH, parallel_layout, tiny_model, tiny_muon, tiny_optimizer, torch_engine

OPTIMIZERS: dict[str, OptimizerConfig] = {
    "adamw bf16": tiny_optimizer(state_dtype=StateDtype.bf16),
    "adamw offload": tiny_optimizer(state_offload=StateOffload.cpu),
    "muon": tiny_muon(),
    "muon bf16 offload": tiny_muon(state_dtype=StateDtype.bf16, state_offload=StateOffload.cpu),
}

Curve = list[tuple[float, float]]


def build(runtime: Runtime, optimizer: OptimizerConfig) -> Engine:
    layout = parallel_layout()
    return build_engine(
        prepare_model(tiny_model("M*-E"), cast_recipe(ComputeDtype.fp32), seed=0),
        mesh=build_mesh(layout, runtime),
        parallel_cfg=layout,
        engine_cfg=torch_engine(),
        optimizer_cfg=optimizer,
        sequence_length=SEQUENCE_LENGTH,
    )


def train_all(runtime: Runtime, directory: Path) -> dict[str, tuple[Curve, Curve]]:
    """Return the curve of each optimizer, and its last steps again after a checkpoint that was saved in its middle."""
    found = {}
    for name, cfg in OPTIMIZERS.items():
        engine = build(runtime, cfg)
        curve = train(engine, [0] * 2, num_microbatches=2)
        path = directory / f"{name.replace(' ', '_')}_{runtime.world_size}" / "step_00000002"
        engine.save(path, {})
        curve += train(engine, [0] * 2, num_microbatches=2)
        resumed = build(runtime, cfg)
        resumed.load(path)
        found[name] = (curve, train(resumed, [0] * 2, num_microbatches=2))
    return found


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, tuple[Curve, Curve]]]:
    directory = tmp_path_factory.mktemp("checkpoints")
    return {ranks: run_on_ranks(train_all, ranks, directory)[0] for ranks in (1, 2)}


@pytest.mark.distributed
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_ranks_train_as_one(curves, name):
    one, two = (curves[ranks][name][0] for ranks in (1, 2))
    for first, second in zip(one, two, strict=True):
        # gradients are summed in another order, and BF16 moments round what that changes
        assert second == pytest.approx(first, rel=1e-4 if "bf16" in name else 1e-5)
    assert one[-1][0] < one[0][0]  # four times the same batch


@pytest.mark.distributed
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_is_bitwise_the_unbroken_one(curves, name):
    for ranks in (1, 2):
        curve, resumed = curves[ranks][name]
        assert resumed == curve[2:]
