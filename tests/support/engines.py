"""Engines around a tiny hybrid, and how to train them."""

from collections.abc import Iterable

import torch
from torch import Tensor

from nvfp4_train.config.model import ModelConfig
from nvfp4_train.config.parallel import ParallelConfig
from nvfp4_train.config.recipe import RecipeConfig
from nvfp4_train.data.batch import Batch
from nvfp4_train.engine.base import Engine
from nvfp4_train.engine.build import build_engine, prepare_model
from nvfp4_train.parallel.mesh import build_mesh
from nvfp4_train.parallel.runtime import Runtime
from tests.support.tiny import SEQUENCE_LENGTH, parallel_layout, tiny_batches, tiny_model, tiny_optimizer, torch_engine

LEARNING_RATE = 3e-3


def build_tiny_engine(
    runtime: Runtime,
    recipe: RecipeConfig,
    *,
    model: ModelConfig | None = None,
    parallel: ParallelConfig | None = None,
    seed: int = 0,
) -> Engine:
    parallel = parallel or parallel_layout()
    mesh = build_mesh(parallel, runtime)
    prepared = prepare_model(model or tiny_model(), recipe, seed=seed)
    return build_engine(
        prepared,
        mesh=mesh,
        parallel_cfg=parallel,
        engine_cfg=torch_engine(),
        optimizer_cfg=tiny_optimizer(),
        sequence_length=SEQUENCE_LENGTH,
    )


def step_batches(engine: Engine, step: int) -> list[Batch]:
    """This rank's microbatches of a step."""
    return tiny_batches(step=step)[engine.mesh.dp_rank :: engine.mesh.dp_degree]


def add_gradients(engine: Engine, step: int) -> Tensor:
    batches = step_batches(engine, step)
    labels = torch.stack([batch.num_labels() for batch in batches]).sum().float()
    return engine.forward_backward(batches, engine.mesh.sum_over_data(labels))


def train(engine: Engine, steps: Iterable[int]) -> list[tuple[float, float]]:
    """Take steps and return loss and gradient norm of each, exactly."""
    found = []
    for step in steps:
        loss = add_gradients(engine, step)
        norm = engine.optimizer_step(lr=LEARNING_RATE, weight_decay=0.1)
        found.append((loss.item(), norm.item()))
    return found


def whole_parameters(engine: Engine) -> dict[str, Tensor]:
    """Copies of the full masters; all ranks must call it."""
    return {name: parameter.full_tensor().detach().clone() for name, parameter in engine.model.named_parameters()}
