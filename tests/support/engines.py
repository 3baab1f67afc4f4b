"""Engines around a tiny hybrid, and how to train them."""

from collections.abc import Iterable

import torch
from torch import Tensor

from nvfp4_train.checkpoint.state import collect_state
from nvfp4_train.config.engine import EngineConfig
from nvfp4_train.config.model import ModelConfig
from nvfp4_train.config.optimizer import OptimizerConfig
from nvfp4_train.config.parallel import ParallelConfig
from nvfp4_train.config.recipe import RecipeConfig
from nvfp4_train.data.batch import Batch
from nvfp4_train.engine.base import Engine
from nvfp4_train.engine.build import build_engine, prepare_model
from nvfp4_train.parallel.mesh import build_mesh
from nvfp4_train.parallel.runtime import Runtime
from nvfp4_train.precision.amax_history import named_histories
from tests.support.tiny import SEQUENCE_LENGTH, parallel_layout, tiny_batches, tiny_model, tiny_optimizer, torch_engine

LEARNING_RATE = 3e-3
# Adam turns the rounding of a gradient near zero into a step of this size, one way or the other.
NVFP4_LEARNING_RATE = 3e-4
# NVFP4 rounds every token on its own: with few of them in a step its noise is as large as what is looked for.
NVFP4_MICRO_BATCH_SIZE = 8


def build_tiny_engine(
    runtime: Runtime,
    recipe: RecipeConfig,
    *,
    model: ModelConfig | None = None,
    parallel: ParallelConfig | None = None,
    engine: EngineConfig | None = None,
    optimizer: OptimizerConfig | None = None,
    seed: int = 0,
) -> Engine:
    parallel = parallel or parallel_layout()
    mesh = build_mesh(parallel, runtime)
    prepared = prepare_model(model or tiny_model(), recipe, seed=seed)
    return build_engine(
        prepared,
        mesh=mesh,
        parallel_cfg=parallel,
        engine_cfg=engine or torch_engine(),
        optimizer_cfg=optimizer or tiny_optimizer(),
        sequence_length=SEQUENCE_LENGTH,
    )


def step_batches(engine: Engine, step: int, *, num_microbatches: int = 4, micro_batch_size: int = 1) -> list[Batch]:
    """This rank's microbatches of a step."""
    batches = tiny_batches(step=step, num_microbatches=num_microbatches, micro_batch_size=micro_batch_size)
    return batches[engine.mesh.dp_rank :: engine.mesh.dp_degree]


def add_gradients(engine: Engine, step: int, **shape: int) -> Tensor:
    """Take one forward and backward; `shape` is what `step_batches` takes."""
    batches = step_batches(engine, step, **shape)
    labels = torch.stack([batch.num_labels() for batch in batches]).sum().float()
    return engine.forward_backward(batches, engine.mesh.sum_over_data(labels))


def train(
    engine: Engine, steps: Iterable[int], *, lr: float = LEARNING_RATE, **shape: int
) -> list[tuple[float, float]]:
    """Take steps and return loss and gradient norm of each, exactly."""
    found = []
    for step in steps:
        loss = add_gradients(engine, step, **shape)
        norm = engine.optimizer_step(lr=lr, weight_decay=0.1)
        found.append((loss.item(), norm.item()))
    return found


def train_nvfp4(engine: Engine, steps: Iterable[int]) -> list[tuple[float, float]]:
    """Do the same where losses in NVFP4 are compared."""
    return train(engine, steps, lr=NVFP4_LEARNING_RATE, micro_batch_size=NVFP4_MICRO_BATCH_SIZE)


def whole_optimizer_state(engine: Engine) -> dict[str, Tensor]:
    """Copies of the full optimizer state; all ranks must call it."""
    state = collect_state(engine.model, engine._optimizer)["optimizer"]  # type: ignore[attr-defined]
    return {
        f"{name}.{key}": (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
        for name, values in state.items()
        for key, value in values.items()
    }


def amax_histories(engine: Engine) -> dict[str, Tensor]:
    """Copies of the histories of delayed scaling."""
    return {name: history.clone() for name, history in named_histories(engine.model).items()}


def whole_parameters(engine: Engine) -> dict[str, Tensor]:
    """Copies of the full masters; all ranks must call it."""
    return {name: parameter.full_tensor().detach().clone() for name, parameter in engine.model.named_parameters()}
