"""What a plan predicts against engines that run: a layout is one line of a table, a recipe another."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from nvfp4_train.analysis.plan.activations import Activations
from nvfp4_train.analysis.plan.calibration import load_efficiency
from nvfp4_train.analysis.plan.hardware import load_hardware
from nvfp4_train.analysis.plan.layout import filled, layout_of
from nvfp4_train.analysis.plan.planner import Planner
from nvfp4_train.analysis.plan.saved import SavedStorages
from nvfp4_train.analysis.plan.step_time import Machine
from nvfp4_train.config.train import TrainConfig
from nvfp4_train.engine.build import build_engine, prepare_model
from nvfp4_train.parallel.mesh import build_mesh
from nvfp4_train.parallel.runtime import Runtime
from tests.support.configs import composed
from tests.support.ranks import run_on_ranks

TOLERANCE = 0.10
RECIPES = ("bf16", "nvfp4", "mxfp8")
# name: ranks, overrides
BYTE_LAYOUTS = {
    "single": (1, ()),
    "bf16 moments": (1, ("optimizer.state_dtype=bf16",)),
    "muon": (1, ("optimizer=muon",)),
    "dp2": (2, ()),
    "hsdp": (2, ("parallel.dp_replicate_degree=2", "parallel.dp_shard_degree=1")),
    "dp2 muon": (2, ("optimizer=muon",)),
}
ACTIVATION_LAYOUTS = {
    "single": (1, ()),
    "single, experts and multi-token prediction": (1, ("model.pattern=M*-E/*E",)),
    "dp2": (2, ()),
    "dp2 block": (2, ("parallel.activation_checkpoint=block",)),
    "dp2 selective": (2, ("parallel.activation_checkpoint=selective",)),
}
# Odd numbers of rows, so that the ranks of a shard hold different amounts.
TINY = ("experiment=tiny", "model.pattern=M*-E", "model.vocab_size=515", "recipe=bf16", "batch.global_batch_size=8")
DEMO = ("experiment=demo", "batch.micro_batch_size=1", "batch.sequence_length=256")

Case = tuple[str, TrainConfig]


def cases(table: dict[str, tuple[int, tuple[str, ...]]], ranks: int, *extra: tuple[str, ...]) -> list[Case]:
    return [
        (" ".join((name, *more)), composed(*overrides, *more))
        for name, (count, overrides) in table.items()
        if count == ranks
        for more in extra
    ]


def planner(cfg: TrainConfig) -> Planner:
    machine = Machine(hardware=load_hardware("H100"), efficiency=load_efficiency())
    return Planner(
        model=cfg.model, recipe=cfg.recipe, optimizer=cfg.optimizer, machine=machine, total_tokens=cfg.run.tokens
    )


def engine_of(cfg: TrainConfig, runtime: Runtime) -> Any:
    mesh = build_mesh(cfg.parallel, runtime)
    prepared = prepare_model(cfg.model, cfg.recipe, seed=0)
    return build_engine(
        prepared,
        mesh=mesh,
        parallel_cfg=cfg.parallel,
        engine_cfg=cfg.engine,
        optimizer_cfg=cfg.optimizer,
        sequence_length=cfg.batch.sequence_length,
    )


def local_bytes(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


def inputs(cfg: TrainConfig) -> dict[str, Tensor]:
    """One document and its successor a row, new tensors each time."""
    shape = (cfg.batch.micro_batch_size, cfg.batch.sequence_length)
    tokens = torch.randint(cfg.model.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    ids = (torch.arange(shape[1]) >= shape[1] // 3).to(torch.int32).expand(shape).contiguous()
    return {"tokens": tokens, "document_ids": ids, "labels": tokens.clone()}


def held_bytes(runtime: Runtime, work: list[Case]) -> dict[str, tuple[int, dict[str, int]]]:
    """Along dp_shard x cp, the rank, and what it holds after a backward."""
    found = {}
    for name, cfg in work:
        engine = engine_of(cfg, runtime)
        batch = inputs(cfg)
        engine.model(batch.pop("tokens"), **batch).backward()
        parameters = list(engine.model.parameters())
        state = [value for values in engine._optimizer.state.values() for value in values.values()]
        held = {
            "masters": sum(map(local_bytes, parameters)),
            "gradients": sum(local_bytes(parameter.grad) for parameter in parameters),
            "optimizer": sum(local_bytes(value) for value in state if isinstance(value, Tensor)),
        }
        found[name] = (engine.mesh.dense["fsdp"].get_local_rank(), held)
        engine.close()
    return found


def kept_bytes(runtime: Runtime, work: list[Case]) -> dict[str, int]:
    """What the second of two microbatches keeps, and the first does not: no weights, and none of their codes."""
    found = {}
    for name, cfg in work:
        engine = engine_of(cfg, runtime)
        graphs, storages = [], []
        for _ in range(2):
            batch = inputs(cfg)
            with SavedStorages(cfg.parallel.activation_checkpoint) as saved:
                graphs.append(engine.model(batch.pop("tokens"), **batch))
            storages.append(saved.storages)
        found[name] = sum(storage.nbytes() for key, storage in storages[1].items() if key not in storages[0])
        engine.close()
    return found


@pytest.mark.parametrize("ranks", [pytest.param(1, id="1"), pytest.param(2, id="2", marks=pytest.mark.distributed)])
def test_parameters_gradients_and_optimizer_state_are_exact(ranks: int):
    work = [(name, replace_model(cfg)) for name, cfg in cases(BYTE_LAYOUTS, ranks, TINY)]
    results = run_on_ranks(held_bytes, ranks, work)
    for name, cfg in work:
        layout = filled(layout_of(cfg), devices=ranks)
        planned = planner(cfg)
        stages = planned.stages(layout)
        for result in results:
            shard, held = result[name]
            memory = planned.memory.of_rank(stages, layout, rank=0, shard=shard)
            assert {kind: memory.by_kind[kind] for kind in held} == held, (name, shard)


def replace_model(cfg: TrainConfig) -> TrainConfig:
    """Few experts: a tiny model."""
    return replace(cfg, model=replace(cfg.model, moe=replace(cfg.model.moe, num_experts=5, d_ff=32, shared_d_ff=48)))


@pytest.mark.parametrize("ranks", [pytest.param(1, id="1"), pytest.param(2, id="2", marks=pytest.mark.distributed)])
def test_activations_of_the_demo(ranks: int):
    work = cases(ACTIVATION_LAYOUTS, ranks, *((*DEMO, f"recipe={recipe}") for recipe in RECIPES))
    results = run_on_ranks(kept_bytes, ranks, work)
    wrong = {}
    for name, cfg in work:
        layout = filled(layout_of(cfg), devices=ranks)
        planned = planner(cfg)
        planned.activations = Activations(model=cfg.model, recipe=cfg.recipe, device="cpu")
        predicted = planned.memory.of_rank(planned.stages(layout), layout, rank=0).activations
        for result in results:
            error = predicted / result[name] - 1
            if abs(error) > TOLERANCE:
                wrong[name] = (predicted, result[name], error)
    assert not wrong
